"""`--on` as people write it, and what is said to them when they slip."""

from __future__ import annotations

import pytest

from shoal.base.errors import PlanError
from shoal.base.estimates.facts import MachineFacts
from shoal.forecast.machines.cluster_syntax import parse_machines


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "name"),
    [
        ("8xH100-80GB", 1, 8, "H100-80GB"),
        ("16x8xH100-80GB", 16, 8, "H100-80GB"),
        ("16 × 8 × h100", 16, 8, "H100-80GB"),
        ("16384xH100-80GB", 2048, 8, "H100-80GB"),
        ("H200", 1, 1, "H200-141GB"),
        ("2x4xA100-SXM4-40GB", 2, 4, "A100-40GB"),
        ("4x8xMI300X", 4, 8, "MI300X-192GB"),
        ("2x4090", 1, 2, "RTX4090-24GB"),
        ("2xNVIDIA A100 80GB", 1, 2, "A100-80GB"),
        ("18x4xGB200", 1, 72, "GB200-186GB"),
        ("1440xGB200", 20, 72, "GB200-186GB"),
    ],
)
def test_nodes_and_devices(text, nodes, per_node, name):
    cluster = parse_machines(text)
    assert (cluster.nodes, cluster.per_node, cluster.device.name) == (nodes, per_node, name)
    assert not cluster.groups
    assert cluster.islands == 1


def test_network_cards_are_shared_by_the_ranks_of_a_node():
    four = parse_machines("32x8xA100-80GB,ib=4x200Gb").across
    eight = parse_machines("32x8xA100-80GB,ib=8x200Gb").across
    alone = parse_machines("32x4xA100-80GB,ib=4x200Gb").across
    assert eight.bytes_per_s == pytest.approx(2 * four.bytes_per_s)
    assert alone.bytes_per_s == pytest.approx(2 * four.bytes_per_s)
    assert 0.8 < four.bytes_per_s / (4 * 200e9 / 8 / 8) <= 1
    slow = parse_machines("2x8xH100,eth=100Gb").across
    assert slow.latency_s > four.latency_s
    assert slow.bytes_per_s < four.bytes_per_s
    rack = parse_machines("36x4xGB200,ib=4x400Gb").across  # cards per tray, not per rack
    assert rack.bytes_per_s == pytest.approx(0.92 * 50e9)


def test_another_link_inside():
    assert parse_machines("8xA100,inside=pcie4").inside.name == "PCIe 4 x16"
    with pytest.raises(PlanError, match="try: nvlink4"):
        parse_machines("8xH100,inside=nvlnk4")


def test_mixed_and_islands():
    mixed = parse_machines("2x8xV100-32GB + 8xA100-40GB,ib=2x200Gb + 4xT4")
    assert mixed.devices == 28
    assert [g.device.name for g in mixed.groups] == ["A100-40GB", "T4-16GB"]
    islands = parse_machines("4x(2x8xH100-80GB,ib=4x400Gb)@200Mbit,latency=80ms")
    assert (islands.islands, islands.devices) == (4, 16)
    assert islands.between.bytes_per_s == 25e6
    assert islands.between.latency_s == 0.08
    assert parse_machines("2x(8xH100)@1.5GB/s").between.bytes_per_s == 1.5e9
    both = parse_machines("2x(8xH100 + 8xA100)@10Gbit")
    assert (both.islands, both.devices, len(both.groups)) == (2, 16, 1)
    assert parse_machines("(8xH100)").islands == 1


def test_brackets_in_front_or_behind_keep_all_their_parts():
    for text in ("(8xV100-32GB + 8xA100-40GB) + 4xT4", "8xV100-32GB + (8xA100-40GB + 4xT4)"):
        mixed = parse_machines(text)
        assert mixed.devices == 20
        assert [g.device.name for g in mixed.groups] == ["A100-40GB", "T4-16GB"]


def test_cpu_shares_the_machine():
    machine = MachineFacts(cores=8, memory_bytes=2**35, gpus=0)
    one, two = parse_machines("cpu", machine), parse_machines("2xcpu", machine)
    assert (one.devices, two.devices, parse_machines("4x2xcpu", machine).devices) == (1, 2, 8)
    for whole, half in (
        (one.device.memory_bytes, two.device.memory_bytes),
        (one.device.matrix_flops_per_s["fp32"], two.device.matrix_flops_per_s["fp32"]),
        (one.device.stream_bytes_per_s, two.device.stream_bytes_per_s),
    ):
        assert whole == 2 * half
    assert "not measured" in one.device.source
    with_gpus = MachineFacts(cores=8, memory_bytes=2**35, gpus=4)
    assert parse_machines("cpu", with_gpus).device.kind == "cpu"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8xH10-80GB", "try: H100-80GB"),
        ("8xH100-94GB", "try: H100-96GB"),
        ("8xTPUv5", "no device of the catalogue"),
        ("", "at its start, then expected a device"),
        ("8x", 'at its start, then expected a device such as "H100-80GB", or "cpu", got "8x"'),
        ("16x8x", 'read "16x" (to character 3), then expected a device'),
        ("2x2x2xH100", 'read "2x2x" (to character 4)'),
        ("0xH100", "counts of at least 1"),
        ("8xH100 8xA100", "no device of the catalogue"),
        ("8xH100,ib", 'read "8xH100" (to character 6), then expected "+"'),
        ("8xH100,ib=fast", "try: ib=8x400Gb"),
        ("8xH100,ib=0x400Gb", "try: ib=8x400Gb"),
        ("8xH100,bi=4x200Gb", "bi= is no option of a machine, which are inside, ib, roce, eth"),
        ("12xH100", "try: 2x8xH100-80GB, or 1x12xH100-80GB for one node"),
        ("4x(8xH100)", "expected the rate between islands"),
        ("4x(8xH100", 'expected ")" or "+"'),
        ("4x(8xH100)@fast", "expected the rate between islands"),
        ("4x(8xH100)@200Mbit,latency=long", "try: latency=50ms"),
        ("4x(8xH100)@200Mbit,jitter=1ms", "latency"),
        ("2x(2x(8xH100)@1Gbit)@1Mbit", "islands hold no islands"),
        ("2x(8xH100)@1Gbit + 8xH100", '"+" stands inside their brackets'),
        ("8xH100)", 'expected "+"'),
    ],
)
def test_one_clear_line(text, says):
    with pytest.raises(PlanError) as failure:
        parse_machines(text)
    line = str(failure.value)
    assert says in line
    assert line.startswith("--on")
    assert "\n" not in line


def test_an_example_that_is_shown_can_be_read():
    with pytest.raises(PlanError) as failure:
        parse_machines("8x")
    shown = str(failure.value).rsplit('--on "', 1)[1].rstrip('"')
    assert parse_machines(shown).devices == 128


DEVICE = """
memory_gib = 96
memory_gb_per_s = 3000
tflops = { bf16 = 400, fp32 = 60 }
inside = 450
network = "ib"
cards = 8
gbit_per_s = 400
node_memory_gib = 1024
"""
HOST = """
cores = 64
memory_gib = 256
network = "eth"
cards = 1
gbit_per_s = 25
"""


def test_a_device_of_ones_own_has_the_figures_of_its_file(tmp_path):
    (tmp_path / "mygpu.toml").write_text(DEVICE)
    (tmp_path / "host.toml").write_text(HOST)
    own = parse_machines(f"4x8x{tmp_path}/mygpu.toml")
    device = own.device
    assert (own.nodes, own.per_node, device.name, device.kind) == (4, 8, "mygpu", "gpu")
    assert device.matrix_flops_per_s == {"bf16": 400e12, "fp32": 60e12}
    assert (device.memory_bytes, own.node_memory_bytes) == (96 * 2**30, 1024 * 2**30)
    assert own.inside.bytes_per_s == 450e9
    assert own.across == parse_machines("4x8xH100,ib=8x400Gb").across
    assert parse_machines(f"1024x{tmp_path}/mygpu.toml").nodes == 128
    cores = parse_machines(f"16x2x{tmp_path}/host.toml")
    assert (cores.devices, cores.device.kind, cores.device.memory_bytes) == (32, "cpu", 2**37)
    assert cores.across.bytes_per_s == pytest.approx(0.8 * 25e9 / 8 / 2)
    mixed = parse_machines(f"8xA100-80GB + 2x4x{tmp_path}/mygpu.toml,eth=100Gb")
    assert [group.device.name for group in mixed.groups] == ["mygpu"]
    assert mixed.groups[0].across.bytes_per_s == pytest.approx(0.8 * 100e9 / 8 / 4)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("tflops = { bf16 = 400, fp32 = 60 }\n", "", "tflops missing; .*try: tflops = { bf16"),
        ("bf16 = 400, ", "", "tflops = .*needs fp32, and bf16 or fp16"),
        ("bf16 = 400", "bf17 = 1, fp16 = 1", "tflops = bf17: not one of fp64.*try: bf16"),
        ("memory_gib = 96", "memory_gib = 0", "memory_gib = 0: needs a number above 0"),
        ("memory_gib = 96", "memory_gib = inf", "memory_gib = inf: needs a number above 0"),
        ("memory_gib = 96", 'memory_gib = "96"', "memory_gib = '96': needs a number above 0"),
        ("cards = 8", "cards = 1.5", "cards = 1.5: needs a whole number; try: cards = 2"),
        ("inside = 450", 'inside = "nvlnk4"', "inside = nvlnk4: not one of .*try: nvlink4"),
        ('"ib"', '"infiniband"', "network = infiniband: not one of ib, roce, eth"),
        ("cards = 8", "cards = 8\nefficency = 0.5", "efficency = 0.5: no such key; try: effic"),
        ("cards = 8", "cards = 8\nefficiency = 75", "efficiency = 75: a share of the peak"),
        ("cards = 8", "cards =", "is no TOML"),
    ],
)
def test_a_wrong_figure_is_named(tmp_path, old, new, said):
    assert old in DEVICE
    (tmp_path / "mygpu.toml").write_text(DEVICE.replace(old, new))
    with pytest.raises(PlanError, match=f"^--on .*mygpu.toml: {said}"):
        parse_machines(f"8x{tmp_path}/mygpu.toml")


def test_a_missing_device_file_says_what_it_would_hold(tmp_path):
    with pytest.raises(PlanError, match="cannot be read .*memory_gib, memory_gb_per_s, tflops"):
        parse_machines(f"8x{tmp_path}/mygpu.toml")
    with pytest.raises(PlanError, match="no device of the catalogue.*8xMyGPU.toml"):
        parse_machines("8xMyGPU")
