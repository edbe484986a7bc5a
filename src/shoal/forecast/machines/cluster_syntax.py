"""Parser of `--on "16x8xH100-80GB,ib=8x400Gb"`, the user's description of a cluster.

    16x8xH100-80GB              16 nodes of 8 · 8xH100 one node · 1024xH100 nodes of the usual 8
    32x8xA100-80GB,ib=4x200Gb   4 network cards of 200 Gbit/s per node; also roce= and eth=
    8xL40S,inside=pcie4         another link within a node (a key of the catalogue's LINKS)
    8xV100-32GB + 8xA100-40GB   a mixed cluster
    4x(8xH100-80GB)@200Mbit     four islands; ,latency=80ms for one way between them
    cpu · 2xcpu                 this machine, 1 or 2 processes: as measured, else a rough default
    4x8xmygpu.toml              a device and a host of one's own (forecast/machines/device_file.py)

Grammar   all := part {"+" part} · part := [n "x"] (island | [n "x"] name {"," key "=" value})
          island := "(" all ")" "@" rate ["," "latency" "=" time]
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from shoal.base.errors import PlanError, check_choice
from shoal.base.estimates.cluster import Cluster, Link
from shoal.base.estimates.facts import MachineFacts
from shoal.forecast.machines.catalogue import (
    LINKS,
    NETWORKS,
    DeviceModel,
    get_device_model,
    network_link,
)
from shoal.forecast.machines.device_file import read_device_file
from shoal.forecast.machines.measured_machine import estimate_this_machine, read_measured

EXAMPLE = "16x8xH100-80GB,ib=8x400Gb"
ISLANDS_LATENCY_S = 0.05
"""Default one-way latency between islands: half of a round trip across an ocean."""

_COUNT = re.compile(r"\s*(\d+)\s*[x×*]\s*(?=[\w(./~])")
_FILE = re.compile(r"\s*([^\s,+()@]+\.toml)\s*(?=[,+)]|$)")
_NAME = re.compile(r"\s*([A-Za-z][\w.]*(?:[- ][A-Za-z0-9]\w*)*|\d{4}\b)\s*")
_OPTION = re.compile(r"\s*,\s*([A-Za-z]+)\s*=\s*([^,+()@]+?)\s*(?=[,+)]|$)")
_RATE = re.compile(r"\s*@\s*(\d+(?:\.\d+)?)\s*([KMGT])(bit|bps|b|B)(?:/s)?\s*(?=[,+)]|$)")
_CARDS = re.compile(r"(?:(\d+)\s*[x×*]\s*)?(\d+(?:\.\d+)?)\s*([MGT])b(?:it|ps)?(?:/s)?$")
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)$")

_BIG = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SHORT = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_machines(
    text: str, machine: MachineFacts | None = None, cache: Path | None = None
) -> Cluster:
    """Parse the cluster of `--on TEXT` (grammar: head of this module).

    Args:
        machine: cores and memory of `cpu`, GPUs not counted; None: those of this machine.
        cache: folder of measured machines; for `cpu` a measurement there overrides `machine`.

    Returns:
        The first part of a mixed cluster, the others in its `groups`; `devices` counts all parts of
        one island.

    Raises:
        PlanError: syntax error, with the text parsed so far and an example; or an unknown device or
            link, with the nearest known one.

    >>> cluster = parse_machines("32x8xA100-80GB,ib=4x200Gb")
    >>> cluster.devices, cluster.device.name, cluster.across.name
    (256, 'A100-80GB', 'InfiniBand 4×200 Gbit/s')
    >>> mixed = parse_machines("8xV100-32GB + 8xA100-40GB")
    >>> mixed.devices, [group.device.name for group in mixed.groups]
    (16, ['A100-40GB'])
    >>> parse_machines("4x(8xH100-80GB)@200Mbit").islands
    4
    """
    reader = _ClusterParser(text, machine, cache)
    cluster = reader.whole()
    reader.expect_end()
    return replace(cluster, name=" ".join(text.split()))


class _ClusterParser:
    """Recursive-descent parser of a cluster's description; `at` is its position."""

    def __init__(self, text: str, machine: MachineFacts | None, cache: Path | None) -> None:
        self.text, self.machine, self.cache = text, machine, cache
        self.at = 0
        self.inside_island = False

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def accept(self, symbol: str) -> bool:
        return self.match(re.compile(r"\s*" + re.escape(symbol) + r"\s*")) is not None

    def syntax_error(self, wanted: str) -> PlanError:
        read, rest = self.text[: self.at].strip(), self.text[self.at :].strip()
        so_far = f'read "{read}" (to character {self.at})' if read else "at its start"
        got = f'"{rest}"' if rest else "the end"
        return PlanError(
            f'--on "{self.text}": {so_far}, then expected {wanted}, got {got}; '
            f'example: --on "{EXAMPLE}"'
        )

    def expect_end(self) -> None:
        if self.text[self.at :].strip():
            raise self.syntax_error('"+", ",key=value" or the end')

    def whole(self) -> Cluster:
        """Parse one part, or several joined by +."""
        first = self.part()
        others: list[Cluster] = []
        while self.accept("+"):
            others.append(self.part())
        if others and (first.islands > 1 or any(other.islands > 1 for other in others)):
            raise PlanError(
                f'--on "{self.text}": islands are equal, so "+" stands inside their brackets; '
                f'try: --on "4x(8xV100-32GB + 8xA100-40GB)@200Mbit"'
            )
        joined = list(first.groups)
        for other in others:  # a part in parentheses may have several groups
            joined += [replace(other, groups=()), *other.groups]
        return replace(first, groups=tuple(joined))

    def part(self) -> Cluster:
        counts: list[int] = []
        while len(counts) < 2 and (found := self.match(_COUNT)):
            counts.append(int(found[1]))
        if 0 in counts:
            raise self.syntax_error("counts of at least 1 before it")
        if len(counts) < 2 and self.accept("("):
            return self.parse_islands(counts[0] if counts else 1)
        if file := self.match(_FILE):
            return self.parse_file(file[1], counts)
        name = self.match(_NAME)
        if not name:
            raise self.syntax_error('a device such as "H100-80GB", or "cpu"')
        if name[1].strip().lower() == "cpu":
            cluster = self.parse_cpu(counts)
            return self.parse_options(cluster, cluster.per_node)
        model = get_device_model(name[1].strip(), f'--on "{self.text}"')
        return self.parse_options(*_model_cluster(model, counts, self.text))

    def parse_file(self, name: str, counts: list[int]) -> Cluster:
        found = read_device_file(Path(name).expanduser())
        if isinstance(found, DeviceModel):
            return self.parse_options(*_model_cluster(found, counts, self.text))
        nodes, processes = [1, 1, *counts][-2:]
        cluster = replace(estimate_this_machine(found.facts, processes), nodes=nodes)
        across = network_link(*found.network, processes)
        return self.parse_options(replace(cluster, across=across), processes)

    def parse_cpu(self, counts: list[int]) -> Cluster:
        nodes, processes = [1, 1, *counts][-2:]
        machine = self.machine or _host_facts()
        measured = read_measured(self.cache, processes, "cpu") if self.cache else None
        alone = replace(machine, gpus=0)
        return replace(measured or estimate_this_machine(alone, processes), nodes=nodes)

    def parse_options(self, cluster: Cluster, sharing: int) -> Cluster:
        """Parse the options of a part; `sharing` ranks of a node share its network cards."""
        while found := self.match(_OPTION):
            key, value = found[1].lower(), found[2]
            if key == "inside":
                check_choice("--on …,inside", value, LINKS, kind=PlanError)
                cluster = replace(cluster, inside=LINKS[value])
            elif key in NETWORKS:
                cluster = replace(cluster, across=self.parse_cards(key, value, sharing))
            else:
                raise PlanError(
                    f'--on "{self.text}": {key}= is no option of a machine, which are inside, ib, '
                    f'roce, eth; example: --on "{EXAMPLE}"'
                )
        return cluster

    def parse_cards(self, key: str, value: str, sharing: int) -> Link:
        found = _CARDS.match(value)
        if not found or not float(found[2]) or found[1] == "0":
            raise PlanError(
                f'--on "{self.text}": {key}={value} is no number of network cards per node and '
                f"their rate in bits per second; try: {key}=8x400Gb"
            )
        gbit_per_s = float(found[2]) * _BIG[found[3]] / 1e9
        return network_link(key, int(found[1] or 1), gbit_per_s, sharing)

    def parse_islands(self, count: int) -> Cluster:
        if self.inside_island:
            raise PlanError(f'--on "{self.text}": islands hold no islands; example: "{EXAMPLE}"')
        self.inside_island = True
        one = self.whole()
        self.inside_island = False
        if not self.accept(")"):
            raise self.syntax_error('")" or "+"')
        if count == 1 and not self.text[self.at :].lstrip().startswith("@"):
            return one
        rate = self.match(_RATE)
        if not rate or not float(rate[1]):
            raise self.syntax_error('the rate between islands, such as "@200Mbit" or "@10Gbit"')
        bytes_per_s = float(rate[1]) * _BIG[rate[2]] / (1 if rate[3] == "B" else 8)
        name = f"{rate[1]} {rate[2]}{'B' if rate[3] == 'B' else 'bit'}/s between islands"
        latency_s, told = self.parse_latency()
        return replace(one, islands=count, between=Link(name, latency_s, bytes_per_s, told))

    def parse_latency(self) -> tuple[float, str]:
        found = self.match(_OPTION)
        if not found:
            return ISLANDS_LATENCY_S, "as given; latency 50 ms assumed"
        if found[1].lower() != "latency":
            raise PlanError(
                f'--on "{self.text}": {found[1]}= is no option of the link between islands; '
                f"try: latency=50ms"
            )
        value = _TIME.match(found[2])
        if not value:
            raise PlanError(f'--on "{self.text}": latency={found[2]} is no time; try: latency=50ms')
        return float(value[1]) * _SHORT[value[2]], "as given"


def _model_cluster(model: DeviceModel, counts: list[int], text: str) -> tuple[Cluster, int]:
    """Return the nodes of one device model, and the ranks that share a node's network cards."""
    if len(counts) == 1 and counts[0] > max(model.per_node, model.domain):
        if counts[0] % model.per_node:
            nodes = -(-counts[0] // model.per_node)
            raise PlanError(
                f'--on "{text}": {counts[0]} {model.device.name} are no whole nodes of '
                f"{model.per_node}; try: {nodes}x{model.per_node}x{model.device.name}, or "
                f"1x{counts[0]}x{model.device.name} for one node"
            )
        counts = [counts[0] // model.per_node, model.per_node]
    nodes, per_node = [1, 1, *counts][-2:]
    kind, cards, gbit_per_s = model.network
    sharing = min(per_node, model.per_node) if model.domain else per_node
    across = network_link(kind, cards, gbit_per_s, sharing)
    if model.domain and per_node == model.per_node:
        nodes, per_node = _merge_domains(nodes, per_node, model.domain)
    cluster = Cluster(
        device=model.device,
        nodes=nodes,
        per_node=per_node,
        inside=model.inside_link,
        across=across,
        host_bytes_per_s=model.host_bytes_per_s,
        disk_bytes_per_s=model.disk_bytes_per_s,
        node_memory_bytes=model.node_bytes * per_node / model.per_node
        if model.domain
        else model.node_bytes,
    )
    return cluster, sharing


def _merge_domains(nodes: int, per_node: int, domain: int) -> tuple[int, int]:
    """Return (nodes, devices per node), with the nodes of one NVLink domain merged into one.

    >>> _merge_domains(18, 4, 72), _merge_domains(36, 4, 72), _merge_domains(8, 4, 72)
    ((1, 72), (2, 72), (1, 32))
    """
    devices = nodes * per_node
    if devices <= domain:
        return 1, devices
    return (devices // domain, domain) if devices % domain == 0 else (nodes, per_node)


def _host_facts() -> MachineFacts:
    """Return cores and memory as the operating system reports them, without probing GPUs."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MachineFacts(os.cpu_count() or 1, memory_bytes, 0)
