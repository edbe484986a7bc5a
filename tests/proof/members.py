"""Islands that come and go, each in a network namespace: deaths, joins, cut links, bytes, time.

    python tests/proof/members.py [comes|pair|cut|bytes|share|loss ...]

    comes   of four members two are killed in different rounds, a new one joins, one is back with an
            old disk, then the first dies; the rest ends, with the bits of one process that repeats
            the committed turns
    pair    two of four are killed in one round: the others wait, name them, and go on with one
    cut     the link of one of four goes down, then those of two: three go on, halves never do
    bytes   what a joiner receives from its start until it has the state, all headers included,
            over what it needs: merged weights, outer momentum, AdamW's state; plain and with keys
    share   one of four is killed and replaced every ten rounds: planned steps over wall time
    loss    the same, five seeds: the loss beside four members that stay, after as many samples; and
            these beside four that stay with another order of samples

Members are processes with keys, one namespace each (`tests/worlds/netns.py`; needs root, `ip` and
`tc`). Bytes are the kernel's counters. Results: proof/results/members.json; exit status 1 if a gate
failed.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [
    str(HERE),
    str(ROOT / "benchmarks"),
    str(ROOT / "tests"),
    str(ROOT / "tests/worlds"),
]

import torch  # noqa: E402
from processes import machine, pace_steps  # noqa: E402
from source import source_hash  # noqa: E402

import cases  # noqa: E402
import guard_off  # noqa: E402
import member_case  # noqa: E402
import netns  # noqa: E402
import shoal  # noqa: E402
from island_case import leave, single  # noqa: E402
from made_keys import key_settings, make_keys  # noqa: E402
from shoal.base.layouts.island_options import IslandsPolicy  # noqa: E402
from shoal.fabric.duplicate_group import destroy_duplicate  # noqa: E402
from shoal.trainer.islands.island_join import join_islands  # noqa: E402
from shoal.trainer.islands.member_job import open_member_rounds, train_turns  # noqa: E402

TARGET = ROOT / "proof" / "results" / "members.json"
PORT, DEADLINE_S, MOST = 29400, 240.0, 5
ASKED = {"model": "towers", "batch": 2, "period": 2, "method": "diloco", "wait_s": 120.0}
ASKED |= {"cosine": -1.0, "bound": 1e9, "step_s": 0.1}
"""Admission is off: sixty rounds of two steps learn these 64 samples, and the median change is near zero."""
MOST_RATIO, LEAST_SHARE, NEEDED_BYTES = 1.1, 0.9, 32 << 20
MOST_ABOVE = 0.01
"""Largest loss above that of fixed members, as a share of it: the mean of five seeds."""
FORK = multiprocessing.get_context("fork")

Turn = dict[str, Any]


class Members:
    """Members of one run; each is a process in a namespace, with its folder and its log."""

    def __init__(self, net: netns.Net, folder: Path, *, keys: bool = True) -> None:
        self.net, self.folder = net, folder
        folder.mkdir(exist_ok=True)
        self.addresses = [f"{address}:{PORT}" for address in net.addresses]
        self.running: dict[int, Any] = {}
        self.keys: dict[str, str] = {}
        if keys:
            make_keys(folder, MOST)
            self.keys = key_settings(folder)

    def start(self, index: int, work: Callable[..., Any], known: int, **asked: Any) -> None:
        """Start a member that knows the first addresses."""
        given = {"addresses": self.addresses[:known], "folder": str(self.folder), **self.keys}
        process = FORK.Process(target=run_member, args=(self, index, work, {**given, **asked}))
        process.start()
        self.running[index] = process

    def kill(self, index: int) -> None:
        os.kill(self.running[index].pid, signal.SIGKILL)
        self.ended(index)

    def ended(self, index: int) -> None:
        """Wait for the end of a member's process."""
        self.running[index].join(DEADLINE_S)
        if self.running.pop(index).exitcode is None:
            raise TimeoutError(f"member {index} lives; logs: {self.read_logs()}")

    def collect(self, *indices: int) -> list[dict[str, Any]]:
        """What members returned at their end."""
        for index in indices:
            self.ended(index)
        files = [self.folder / f"{index}.json" for index in indices]
        if not all(file.exists() for file in files):
            raise RuntimeError(f"a member failed; logs: {self.read_logs()}")
        return [json.loads(file.read_text()) for file in files]

    def events(self, index: int) -> list[dict[str, Any]]:
        file = self.folder / f"island-{index}" / "events.jsonl"
        found = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in found if line.endswith("\n")]

    def turns(self, index: int) -> list[Turn]:
        """Events of the turns that a member installed."""
        names = ("round_committed", "round_discarded")
        return [event for event in self.events(index) if event["event"] in names]

    def wait_for(self, index: int, wanted: Callable[[Turn], bool]) -> float:
        """Wait for a turn of a member; return when it was seen."""
        return self._wait(lambda: any(map(wanted, self.turns(index))))

    def wait_for_line(self, index: int, text: str) -> str:
        """Wait for a notice of a member; return it."""
        self._wait(lambda: self._find_line(index, text))
        return self._find_line(index, text)

    def _find_line(self, index: int, text: str) -> str:
        found = [str(event.get("text")) for event in self.events(index)]
        return next((line for line in found if text in line), "")

    def _wait(self, ready: Callable[[], Any]) -> float:
        until_s = time.monotonic() + DEADLINE_S
        while not ready():
            if time.monotonic() > until_s:
                raise TimeoutError(f"waited in vain; logs: {self.read_logs()}")
            time.sleep(0.02)
        return time.monotonic()

    def read_logs(self) -> str:
        """The last lines of all members."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in logs)

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.join()


def run_member(
    members: Members, index: int, work: Callable[..., Any], asked: dict[str, Any]
) -> None:
    """One member's process."""
    log = os.open(members.folder / f"{index}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        members.net.enter(index)
        torch.set_num_threads(1)
        guard_off.switch_off()
        found = work(single(), index, **asked)
        (members.folder / f"{index}.json").write_text(json.dumps(found))
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)  # threads of a failed member may live on


def in_one_process(work: Callable[..., Any], **asked: Any) -> Any:
    """Return what a function returns in a process of its own; this one stays without threads."""
    mine, its = FORK.Pipe()

    def run() -> None:
        torch.set_num_threads(1)
        its.send(work(single(), **asked))

    process = FORK.Process(target=run)
    process.start()
    found = mine.recv()
    process.join()
    return found


def check_history(members: Members, indices: list[int]) -> dict[int, Turn]:
    """Return the merged turns of all members by round; each round has one.

    Raises:
        AssertionError: two members merged a round unlike.
    """
    found: dict[int, Turn] = {}
    for index in indices:
        for turn in members.turns(index):
            if turn["event"] == "round_committed":
                first = found.setdefault(turn["round"], turn)
                assert (first["digest"], first["members"]) == (turn["digest"], turn["members"])
                assert turn["divisor"] == sum(tokens for *_, tokens in turn["members"])
    return found


def judge(members: Members, told: list[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """What must hold at the end of each scenario."""
    history = check_history(members, list(range(MOST)))
    return {
        "rounds": rounds,
        "members_that_ended": len(told),
        "all_finished": all(one.get("finished") for one in told),
        "weights_are_equal": len({one.get("weights") for one in told}) == 1,
        "one_history": sorted(history) == list(range(rounds)),
    }


def run_comes(members: Members) -> dict[str, Any]:
    """Deaths in two rounds, a new member, an old disk, and the death of the first."""
    rounds, train = 60, member_case.train
    asked = {**ASKED, "rounds": rounds}
    dies = [{"island": 2, "round": 1, "what": "die"}]
    for index in range(4):
        members.start(index, train, 4, **asked, trouble=dies)
    members.ended(2)
    old = members.folder / "old"
    shutil.copytree(members.folder / "island-2", old)
    members.wait_for(0, lambda turn: turn["seats"] == [0, 1, 3])
    members.kill(3)
    members.wait_for(0, lambda turn: turn["seats"] == [0, 1])
    members.start(4, train, 5, **asked)
    members.wait_for(0, lambda turn: turn["seats"] == [0, 1, 4])
    shutil.rmtree(members.folder / "island-2")
    old.rename(members.folder / "island-2")
    members.start(2, train, 4, **asked)
    members.wait_for(0, lambda turn: turn["seats"] == [0, 1, 2, 4])
    members.kill(0)
    members.wait_for(1, lambda turn: turn["seats"] == [1, 2, 4])
    told = members.collect(1, 2, 4)
    history = check_history(members, list(range(MOST)))
    wanted = {key: ASKED[key] for key in ("model", "batch", "period")}
    ordered = [history[number] for number in sorted(history)]
    alone = in_one_process(member_case.repeated, turns=ordered, first=[0, 1, 2, 3], **wanted)
    merged = [[name for name, *_ in turn["members"]] for turn in ordered]
    seen = [names for k, names in enumerate(merged) if not k or names != merged[k - 1]]
    found = judge(members, told, rounds)
    found["equal_to_one_process"] = alone == told[0]["weights"]
    return {**found, "mergers_in_order": seen}


def run_pair(members: Members) -> dict[str, Any]:
    """Two die in one round: the others wait for them by name, and go on when one is back."""
    rounds, train = 8, member_case.train
    dies = [{"island": index, "round": 1, "what": "die"} for index in (2, 3)]
    for index in range(4):
        members.start(index, train, 4, **ASKED, rounds=rounds, trouble=dies)
    members.ended(2)
    members.ended(3)
    lines = [members.wait_for_line(index, "waits for islands 2 and 3") for index in (0, 1)]
    at_wait = [len(members.turns(index)) for index in (0, 1)]
    time.sleep(3.0)
    waited = at_wait == [len(members.turns(index)) for index in (0, 1)]
    members.start(2, train, 4, **ASKED, rounds=rounds)
    told = members.collect(0, 1, 2)
    found = judge(members, told, rounds)
    return {**found, "nobody_merged_meanwhile": waited, "lines": lines}


def run_cut(members: Members) -> dict[str, Any]:
    """One link goes down and comes back; then two, so that two halves are left."""
    rounds, train = 60, member_case.train
    asked = {**ASKED, "rounds": rounds}
    for index in range(4):
        members.start(index, train, 4, **asked)
    members.wait_for(0, lambda turn: turn["round"] >= 1)
    members.net.cut(3)
    cut_s = time.monotonic()
    went_on_s = members.wait_for(0, lambda turn: turn["seats"] == [0, 1, 2]) - cut_s
    members.net.mend(3)
    mended_s, past = time.monotonic(), len(members.turns(0))
    back_s = members._wait(lambda: any(3 in turn["seats"] for turn in members.turns(0)[past:]))
    for index in (2, 3):
        members.net.cut(index)
    line = members.wait_for_line(0, "waits for islands 2 and 3")
    before = [len(members.turns(index)) for index in range(4)]
    time.sleep(10.0)
    still = before == [len(members.turns(index)) for index in range(4)]
    for index in (2, 3):
        members.net.mend(index)
    told = members.collect(0, 1, 2, 3)
    found = judge(members, told, rounds)
    times = {"three_went_on_s": went_on_s, "back_s": back_s - mended_s}
    return {**found, "no_half_went_on": still, "line": line, **times}


def train_large(
    world: Any,
    index: int,
    addresses: list[str],
    folder: str,
    *,
    rounds: int,
    side: int,
    **policy: Any,
) -> dict[str, Any]:
    """Train 3 · side² weights with AdamW; its steps are planned sleeps."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(side, side, bias=False) for _ in range(3)]
    model = torch.nn.Sequential(*layers)
    data = [(torch.randn(side), torch.tensor(k % 10)) for k in range(64)]
    run = shoal.parallelize(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        shoal.mean_of_samples(torch.nn.CrossEntropyLoss()),
        "single",
        batch=2,
        micro_batch=2,
        precision="fp32",
        seed=3,
        folder=Path(folder) / f"island-{index}",
        world=world,
    )
    period, step_s = policy.pop("period"), policy.pop("step_s")
    asked = IslandsPolicy(
        "diloco", count=len(addresses), period=period, least=1, pace="equal",
        at=",".join(addresses), index=index, **policy,
    )  # fmt: skip
    joined = join_islands(run, asked.resolved())
    loop = open_member_rounds(run, joined, run.loader(data), rounds * period, {})
    pace_steps(run, step_s)
    heal, healed = loop.checkpoints.heal, list[int]()

    def heal_and_count(fact: Any) -> bool:
        done = heal(fact)
        healed.append(netns.counters()[0])  # of its namespace, which is new
        return done

    loop.checkpoints.heal = heal_and_count
    finished = train_turns(loop)
    run.checkpoint_saver.wait_pending()
    loop.ranks.finish(10.0)
    told = {"finished": finished, "weights": loop.common.digest, "healed_bytes": healed}
    destroy_duplicate(loop.ranks.world)
    leave(run, joined)
    return told


def run_bytes(members: Members) -> dict[str, Any]:
    """A joiner of two members: bytes until it has the state, over what it needs of it."""
    side, rounds = 880, 4
    asked = {"rounds": rounds, "side": side, "period": 40, "step_s": 0.5, "cosine": -1.0}
    for index in range(2):
        members.start(index, train_large, 2, **asked)
    members.wait_for(0, lambda turn: turn["round"] >= 0)
    members.start(2, train_large, 3, **asked)
    told = members.collect(0, 1, 2)
    (received,) = told[2]["healed_bytes"]
    parameters = 3 * side**2
    needed = 4 * 4 * parameters
    assert needed >= NEEDED_BYTES
    return {
        "finished": all(one["finished"] for one in told),
        "weights_are_equal": len({one["weights"] for one in told}) == 1,
        "parameters": parameters,
        "needed_bytes": needed,
        "received_bytes": received,
        "ratio": received / needed,
    }


def run_share(members: Members) -> dict[str, Any]:
    """Planned steps over wall time of the member that lives on, with a death every ten rounds."""
    rounds, train = 40, member_case.train
    asked = {**ASKED, "rounds": rounds, "period": 4, "step_s": 0.5}
    for index in range(4):
        members.start(index, train, 4, **asked)
    members.wait_for(0, lambda turn: turn["round"] >= 0)
    began_s, first = time.monotonic(), members.turns(0)[-1]["round"] + 1
    for number, index in ((10, 1), (20, 2), (30, 3)):
        members.wait_for(0, lambda turn, number=number: turn["round"] >= number)
        members.kill(index)
        members.start(index, train, 4, **asked)
    wall_s = members.wait_for(0, lambda turn: turn["round"] >= rounds - 1) - began_s
    told = members.collect(0, 1, 2, 3)
    planned_s = (rounds - first) * asked["period"] * asked["step_s"]
    found = judge(members, told, rounds)
    left = [turn["round"] for turn in members.turns(0) if turn["left"]]
    return {**found, "deaths_in_rounds": left, "wall_s": wall_s, "share": planned_s / wall_s}


def train_to(members: Members, rounds: int, seed: int, deaths: tuple[int, ...]) -> int:
    """Train four members, one of which dies in each of some rounds; return the samples of all."""
    asked = {**ASKED, "model": cases.WITHOUT_DROPOUT, "batch": 4, "period": 4, "step_s": 0.25}
    asked |= {"rounds": rounds, "seed": seed, "optimizer": "adamw", "precision": "fp32"}
    for index in range(4):
        members.start(index, member_case.train, 4, **asked)
    for place, death in enumerate(deaths):
        members.wait_for(0, lambda turn, death=death: turn["round"] >= death)
        members.kill(1 + place % 3)
        members.start(1 + place % 3, member_case.train, 4, **asked)
    found = judge(members, members.collect(0, 1, 2, 3), rounds)
    assert all(found[key] for key in ("all_finished", "weights_are_equal", "one_history")), found
    turns = check_history(members, [0, 1, 2, 3]).values()
    return sum(samples for turn in turns for _, _, samples, _ in turn["members"])


def loss_of(world: Any, weights: str) -> float:
    """The mean loss on all samples of the model with these weights; of the first ones without."""
    model, data = cases.build("llama").eval(), cases.dataset("llama")
    if weights:
        model.load_state_dict(torch.load(weights), strict=False)  # tied: no head.weight
    batch = torch.utils.data.default_collate([data[k] for k in range(len(data))])
    with torch.no_grad():
        total, count = cases.plain_loss("llama", model, batch)
    return float(total / count)


def run_loss(members: Members) -> dict[str, Any]:
    """The loss of members of which one is killed and replaced every ten rounds, for five seeds."""
    rounds, full = 40, 4 * 4 * 4
    rows: list[dict[str, Any]] = []

    def measure(kind: str, seed: int, rounds: int, deaths: tuple[int, ...] = ()) -> dict[str, Any]:
        own = Members(members.net, members.folder / f"{kind}-{seed}")
        try:
            samples = train_to(own, rounds, seed, deaths)
        finally:
            own.close()
        loss = in_one_process(loss_of, weights=str(own.folder / "weights-0.pt"))
        found = {"kind": kind, "seed": seed, "rounds": rounds, "samples": samples, "loss": loss}
        rows.append(found)
        print(json.dumps(found), flush=True)
        return found

    for seed in range(5):
        changing = measure("changing", seed, rounds, deaths=(10, 20, 30))
        alike = math.ceil(changing["samples"] / full)  # fixed members get the part of a round more
        measure("fixed", seed, alike)
        measure("other order", seed + 100, alike)
    mean = {
        kind: sum(row["loss"] for row in rows if row["kind"] == kind) / 5
        for kind in ("changing", "fixed", "other order")
    }
    return {
        "start": in_one_process(loss_of, weights=""),
        "rows": rows,
        "mean": mean,
        "above_fixed": mean["changing"] / mean["fixed"] - 1,
        "a_a": mean["other order"] / mean["fixed"] - 1,
    }


SCENARIOS: dict[str, Callable[[Members], dict[str, Any]]] = {
    "comes": run_comes,
    "pair": run_pair,
    "cut": run_cut,
    "bytes": run_bytes,
    "share": run_share,
    "loss": run_loss,
}


def find_failures(name: str, found: dict[str, Any]) -> list[str]:
    """Return the gates that a result misses."""
    wrong = [key for key, value in found.items() if value is False]
    if found.get("ratio", 0.0) > MOST_RATIO:
        wrong.append(f"ratio {found['ratio']:.3f}")
    if found.get("share", math.inf) < LEAST_SHARE:
        wrong.append(f"share {found['share']:.3f}")
    if found.get("above_fixed", 0.0) > MOST_ABOVE:
        wrong.append(f"loss {found['above_fixed']:+.2%} above that of fixed members")
    return [f"{name}: {one}" for one in wrong]


def run_scenario(name: str, *, keys: bool = True) -> dict[str, Any]:
    """Run one scenario in namespaces of its own."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, netns.Net(MOST) as net:
        members = Members(net, Path(folder), keys=keys)
        began_s = time.monotonic()
        try:
            found = SCENARIOS[name](members)
        finally:
            members.close()
        found["seconds"] = time.monotonic() - began_s
    found["load"] = [load, os.getloadavg()[0]]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", default=list(SCENARIOS))
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args()
    os.environ["SHOAL_TOKEN"] = "the token of this proof"
    torch.set_num_threads(1)
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    failures: list[str] = []
    for name in options.names:
        for keys in (True, False) if name == "bytes" else (True,):
            row = name if keys else f"{name}, without keys"
            found = run_scenario(name, keys=keys)
            results[row] = {**found, "source": source_hash()}
            failures += find_failures(row, found)
            results["machine"] = machine()
            options.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
            print(f"{row}: {found}", flush=True)
    for line in failures:
        print(f"missed: {line}", flush=True)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
