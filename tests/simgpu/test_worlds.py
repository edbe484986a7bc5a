"""A sample of the tests of real processes, `tests/worlds`, passes as it stands on simulated devices.

Every layout on 2 and on 4 of them, compression, recompute, checkpoints that go on in another
layout, islands; offload is `test_offload` and rows of `test_own_loop`, since what `tests/worlds` has
of it are files, which a run on devices refuses. What those tests demand stays what it is: float64 within 1e-12 of one
process, or its bits. Here copies and kernels are late, and a missing wait is red by the device's
clocks. A hang ends by the deadline of a member's call, 120 s, and names the ranks that are silent.

    make proof    all of the sample under 20 seeds; what ran: proof/results/simulated-worlds.json
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "proof" / "results" / "simulated-worlds.json"
DEADLINE_S = 1800.0

EQUAL = "equality.py::test_a_layout_equals_one_process"
TENSOR = "tensor.py::test_equals_one_process"
PIPE = "pipe.py::test_a_pipeline_equals_one_process"
CONTEXT = "context.py::test_equals_one_process"
EXPERT = "expert.py::test_equals_one_process"
SUMS = "compress.py::test_decoded_sums_and_what_is_kept_make_the_true_sums"
ISLAND = "islands.py::test_what_is_inside_an_island_does_not_matter"

SHORT = {
    "pp × fsdp × ep on 4": f"{EXPERT}[4-moe-pp2 fsdp2 ep2]",
    "checkpoints, interleaved → zero 1": (
        "parts_resume.py::test_stages_of_an_interleaved_pipeline_go_on"
    ),
}
"""What `make test` runs, by what it is there for; on 2 devices `test_own_loop` has the layouts."""

LONG = {
    "hsdp on 4": f"{EQUAL}[hsdp-mlp-4]",
    "cp × tp on 4": CONTEXT + "[4-dropout-{'cp': 2, 'tp': 2}]",
    "zero 1 on 4": f"{EQUAL}[zero1-mlp-4]",
    "recompute on 2": "recompute_layouts.py::test_recompute_gives_the_same_bits[cnn-fsdp]",
    "ddp on 2": f"{EQUAL}[ddp-cnn-2]",
    "int8 on 4": "compress.py::test_owners_of_unequal_parts_and_of_nothing",
    "islands of 1": "islands.py::test_period_1_is_data_parallelism",
    "ddp on 4": f"{EQUAL}[ddp-gpt-4]",
    "zero 1 on 2": f"{EQUAL}[zero1-llama-2]",
    "zero 2 on 2": f"{EQUAL}[zero2-cnn-2]",
    "zero 2 on 4": f"{EQUAL}[zero2-gpt-4]",
    "fsdp on 2": f"{EQUAL}[fsdp-llama-2]",
    "fsdp on 4": f"{EQUAL}[fsdp-mlp-4]",
    "fsdp, kept within a node": (
        "equality.py::test_weights_kept_between_passes_compute_the_same[llama-fsdp-node-2]"
    ),
    "tp on 2": f"{TENSOR}[2-llama-{{}}-{{}}]",
    "tp on 4": f"{TENSOR}[4-fused-{{}}-{{}}]",
    **{
        f"{name} on {size}": f"{PIPE}[{size}-{count}-{name}-{chunks}]"
        for size, count in ((2, 5), (4, 3))
        for name, chunks in (
            *(("gpipe", 1), ("1f1b", 1), ("interleaved", 2)),
            *(("zero-bubble", 1), ("zbv", 1), ("dualpipe", 1)),
        )
    },
    "dualpipe × zero 1 on 4": "dualpipe.py::test_two_copies_equal_one_process[gpt-degrees4-25]",
    "cp on 2, ring": CONTEXT + "[2-llama-{'cp': 2}]",
    "cp on 2, gathered": CONTEXT + "[2-llama-{'cp': 2, 'context': 'gather'}]",
    "cp × zero 2 on 4, ulysses": (
        CONTEXT + "[4-llama-{'cp': 2, 'dp_shard': 2, 'zero': 2, 'context': 'ulysses'}]"
    ),
    "cp × pp on 4": CONTEXT + "[4-dropout-{'cp': 2, 'pp': 2}]",
    "cp × fsdp × ep on 4": CONTEXT + "[4-moe-{'cp': 2, 'dp_shard': 2, 'ep': 2}]",
    "ep on 2": f"{EXPERT}[2-moe with capacity-ep2]",
    "fsdp × ep on 4": f"{EXPERT}[4-moe-fsdp4 ep2]",
    "tp × ep on 4": f"{EXPERT}[4-moe without dropout-tp2 ep2]",
    "bf16": "precision.py::test_layouts_agree_with_one_process[fsdp-bf16]",
    "int8, ddp": f"{SUMS}[int8-ddp]",
    "int8, zero 2": f"{SUMS}[int8-zero2]",
    "powersgd": "compress.py::test_training_arrives_where_it_would[powersgd:8-ddp-0.05]",
    "topk": "compress.py::test_training_arrives_where_it_would[topk:0.1-ddp-0.05]",
    "recompute, ddp": "recompute_layouts.py::test_recompute_gives_the_same_bits[llama-ddp]",
    "checkpoints, tp × pp → fsdp → one": "parts_resume.py::test_a_grid_goes_on_over_all_layouts",
    "checkpoints, tp 4 → pp × fsdp → tp 4": (
        "parts_resume.py::test_fewer_key_heads_than_ranks_go_on"
    ),
    "checkpoints, fsdp → ddp → hsdp → zero 1 → one": (
        "layout_resume.py::test_a_run_goes_on_over_all_layouts[mlp-adamw]"
    ),
    "saved beside training on 4": (
        "saving.py::test_a_writer_that_fails_on_rank_1_is_known_to_all_at_one_step[4]"
    ),
    "islands of 2, zero 1": f"{ISLAND}[zero1]",
    "islands of 2, fsdp": f"{ISLAND}[fsdp]",
    "islands that stream, resumed": "islands.py::test_what_travels_is_resumed",
}
"""What `make proof` runs too."""


def passed(environ: dict[str, str], names: list[str], seed: int) -> int:
    """How many tests passed: all of these, or the assertion says what pytest said."""
    tests = []
    for name in names:  # "islands.py::test_…"
        file, _, test = name.partition("::")
        (path,) = (ROOT / "tests" / "worlds").rglob(f"test_{file}")
        tests.append(f"{path}::{test}" if test else str(path))
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "proof or not proof",
            "-p",
            "no:cacheprovider",
            *tests,
        ],
        cwd=ROOT,
        env={**environ, "SIM_SEED": str(seed), "SIM_MODE": "drawn"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            said = running.communicate(timeout=DEADLINE_S)[0]
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)  # members too: nobody reads what they would say
            said = running.communicate()[0] + f"\nnot over after {DEADLINE_S} s"
    assert running.returncode == 0, said[-6000:]
    return int(re.search(r"(\d+) passed", said)[1])


def test_a_sample_passes(environ: dict[str, str]) -> None:
    assert passed(environ, list(SHORT.values()), 0) == len(SHORT)


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("which", ["short", "whole"])
def test_it_passes_under_every_seed(environ: dict[str, str], which: str, seed: int) -> None:
    tests = SHORT if which == "short" else SHORT | LONG
    assert passed(environ, list(tests.values()), seed) == len(tests)
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {"devices": [2, 4], "mode": "drawn"}
    kept[which] = {
        "tests": sorted(tests.values()),
        "seeds": sorted({*kept.get(which, {}).get("seeds", []), seed}),
    }
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
