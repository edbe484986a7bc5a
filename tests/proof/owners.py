"""Owners with unlike data, on real runs: SCAFFOLD beside FedAvg, honest owners, one wrong owner.

    python tests/proof/owners.py              all parts; about ten processor minutes
    python tests/proof/owners.py splits       one part: rounds, splits, wrong, unlike, few

    rounds   rounds until a validation accuracy, SCAFFOLD and FedAvg, three models
    splits   accuracy after some rounds on Dirichlet(0.1) and one-label data; refused owners
    wrong    one of five owners sends its change reversed, or learns permuted labels
    unlike   one of five owners with unlike data learns permuted labels
    few      accuracy after a few rounds of one epoch and of five, of owners with unlike data

Each trial is the main job of `shoal train` on the digits, in a child of this process that has all
modules imported: configuration, rounds, checkpoints, validations and events are a run's own. The
wrong owner is planted from outside. Gates, seeds and settings are in owners_gates.toml, which was
committed before the first trial, and in owners_gates_second.toml, which was committed before the
first trial of its model, and says why a second CNN is tried. The last two parts have no gate, and
their settings in owners_unlike.toml. Trials that the result has of these settings are not made again:
each has the hash of the source that it was made with. Several processes may run at the same time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import resource
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "benchmarks")]
os.environ["OMP_NUM_THREADS"] = "1"

from owner_models import ACCURACY  # noqa: E402
from processes import machine  # noqa: E402
from source import source_hash  # noqa: E402

TARGET = ROOT / "proof" / "results" / "owners.json"
GATES = HERE / "owners_gates.toml"
SECOND = HERE / "owners_gates_second.toml"
UNLIKE = HERE / "owners_unlike.toml"
SECOND_MODEL, REPLACED = "groupnorm", "cnn"
"""Model of the second gates, and that of the first ones whose place it takes."""
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantiles 0.975 of Student's t for 2 to 10 values."""

Trial = dict[str, Any]
Row = dict[str, Any]


def trials(gates: dict[str, Any]) -> Iterable[Trial]:
    """Yield every trial: its part, what tells it apart, and the words of `shoal train`."""
    for model, common in rounds_gates(gates).items():
        for seed in common["seeds"]:
            for method in ("fedavg", "scaffold"):
                own = {**common, **common[model], "rounds": common[model]["most"]}
                words = [*many_owners(own, method, common["split"], seed, model)]
                yield {"part": "rounds", "model": model, "method": method, "seed": seed,
                       "words": words, "accuracy": own["accuracy"]}  # fmt: skip
    own = gates["splits"]
    for split in own["splits"]:
        for seed in own["seeds"]:
            for method in own["methods"]:
                words = [*many_owners(own, method, split, seed, "logistic")]
                yield {"part": "splits", "split": split, "method": method, "seed": seed,
                       "words": words}  # fmt: skip
    own = gates["wrong"]
    for merge in own["merges"]:
        for fault in ("none", *own["faults"]):
            for seed in own["seeds"]:
                words = five_owners(own, "fedavg", "even", seed, merge, epochs=1)
                yield {"part": "wrong", "merge": merge, "fault": fault, "seed": seed,
                       "words": words}  # fmt: skip
    yield from unlike_trials(gates)


def unlike_trials(gates: dict[str, Any]) -> Iterable[Trial]:
    """Yield the trials without a gate: five owners with unlike data."""
    own = {**gates["wrong"], **gates["unlike"]["few"]}
    own["rounds"] = max(own["rounds"])
    for split in own["splits"]:
        for epochs in own["epochs"]:
            for method in own["methods"]:
                for seed in own["seeds"]:
                    words = five_owners(own, method, split, seed, "mean", epochs=epochs)
                    words += ["train.validate_every=1"]
                    yield {"part": "few", "split": split, "epochs": epochs, "method": method,
                           "seed": seed, "words": words}  # fmt: skip
    own = {**gates["wrong"], **gates["unlike"]["unlike"]}
    for split in own["splits"]:
        for choice in own["choices"]:
            method, merge = ("scaffold", "mean") if choice == "scaffold" else ("fedavg", choice)
            for fault in ("none", *own["faults"]):
                for seed in own["seeds"]:
                    words = five_owners(own, method, split, seed, merge, epochs=1)
                    yield {"part": "unlike", "split": split, "merge": choice, "fault": fault,
                           "seed": seed, "words": words}  # fmt: skip


def five_owners(
    own: dict[str, Any], method: str, split: str, seed: int, merge: str, *, epochs: int
) -> list[str]:
    """Return the words of a trial in which all of five owners train so many epochs per round."""
    return [
        *usual(own, seed, "logistic"), f"islands.method={method}", f"data.split={split}",
        f"islands.merge={merge}", f"islands.trim={own['trim']}", "islands.bound=1e9",
        f"islands.period={epochs} epoch", f"train.epochs={epochs * own['rounds']}",
    ]  # fmt: skip


def rounds_gates(gates: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return for each model of the part `rounds` the table that holds its settings."""
    first, second = gates["rounds"], gates["second"]["rounds"]
    return {"logistic": first, REPLACED: first, SECOND_MODEL: second}


def usual(own: dict[str, Any], seed: int, model: str) -> list[str]:
    """Return the words of every trial."""
    return [
        "data.source=digits", f"data.validation={own['validation']}", "train.validate_samples=all",
        f"model.build=owner_models:{model}", "islands.data=own", "islands.concurrent=1",
        f"islands.count={own['owners']}", f"train.seed={seed}", f"train.batch={own['batch']}",
        "optimizer.name=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0",
        "optimizer.clip=0", "optimizer.schedule=constant", f"optimizer.lr={own['lr']}",
        f"optimizer.warmup_steps={own.get('warmup_steps', -1)}",
        "launch.processes=1", "layout.strategy=single", "train.prove=off", "checkpoint.keep=2",
    ]  # fmt: skip


def many_owners(own: dict[str, Any], method: str, split: str, seed: int, model: str) -> list[str]:
    """Return the words of a trial in which a share of many owners is drawn."""
    return [
        *usual(own, seed, model), f"islands.method={method}", f"data.split={split}",
        f"islands.sample={own['sample']}", f"islands.period={own['period']}",
        f"train.steps={own['rounds'] * own['period']}", f"train.validate_every={own['period']}",
        "train.on=owner_models:stop_at_accuracy",
    ]  # fmt: skip


def plant(fault: str, owner: int, seed: int) -> None:
    """Make an owner wrong in this process."""
    from shoal.trainer.islands import owner_data
    from shoal.trainer.islands.owner_rounds import OwnerRounds

    if fault == "reversed":
        train_owner = OwnerRounds._train_owner

        def reversed_change(self: Any, number: int) -> Any:
            change, control = train_owner(self, number)
            if number == owner:
                for tensor in change.message.values():
                    tensor.neg_()
            return change, control

        OwnerRounds._train_owner = reversed_change  # type: ignore[method-assign]
        return
    honest = owner_data.OwnerSubset
    made: list[int] = []

    class Permuted(honest):  # type: ignore[misc, valid-type]
        """The samples of an owner; of the wrong one, label y is called another."""

        def __init__(self, dataset: Any, indices: Any) -> None:
            super().__init__(dataset, indices)
            self.is_wrong = len(made) == owner
            made.append(1)

        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return image, (label + 1 + seed % 9) % 10 if self.is_wrong else label

    owner_data.OwnerSubset = Permuted  # type: ignore[misc]


def run_trial(trial: Trial, owners: int) -> Row:
    """Run a trial in a child; return what its events say."""
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if not child:
            status = 1
            try:
                log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT)
                os.dup2(log, 1)
                os.dup2(log, 2)
                status = train(trial, Path(folder), owners)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        _, state, used = os.wait4(child, 0)
        if os.waitstatus_to_exitcode(state) not in (0, 143):
            raise SystemExit(f"{trial}: {Path(folder, 'log').read_text()[-3000:]}")
        lines = (Path(folder) / "trial" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    curve = [event["accuracy"] for event in events if event["event"] == "validated"]
    rounds = [event for event in events if event["event"] in ("round_committed", "round_discarded")]
    last = [event for event in events if event["event"] == "validated"][-1]
    apart = {
        name: [row["accuracy"], row["targets"]] for name, row in last.get("by_source", {}).items()
    }
    held = {name: one["samples"] for event in rounds for name, one in event["by_owner"].items()}
    row = {key: value for key, value in trial.items() if key not in ("words", "accuracy")}
    return {
        **row,
        "rounds": len(rounds),
        "refused": sum(len(event.get("refused") or {}) for event in rounds),
        "curve": [round(one, 4) for one in curve],
        **({"held": held} if trial["part"] in ("unlike", "few") else {}),
        **({"by_owner": apart} if trial["part"] == "unlike" else {}),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
    }


def train(trial: Trial, folder: Path, owners: int) -> int:
    """Make the run folder of a trial and train it; return the exit code."""
    from shoal.cli.start import prepare_run, write_run_folder
    from shoal.trainer.main_job import train as train_folder

    os.environ[ACCURACY] = str(trial.get("accuracy", 2.0))
    if trial.get("fault", "none") != "none":
        plant(trial["fault"], owners - 1, trial["seed"])
    words = [*trial["words"], f"run.folder={folder}", "run.name=trial"]
    prepared = prepare_run(words, None, trust=True)
    prepared.folder.mkdir(parents=True)
    write_run_folder(prepared)
    return train_folder(prepared.folder, lambda *_: "")


def reached(row: Row, gates: dict[str, Any]) -> int:
    """Return the first round whose validation has the accuracy; most + 1 if none has."""
    own = rounds_gates(gates)[row["model"]][row["model"]]
    each = row["curve"][: own["most"]]  # the last validation comes twice
    there = [k for k, one in enumerate(each, 1) if one >= own["accuracy"]]
    return there[0] if there else own["most"] + 1


def interval(values: list[float]) -> list[float]:
    """Return the mean, and the ends of its 95 % interval."""
    n = len(values)
    mean = sum(values) / n
    deviation = (sum((one - mean) ** 2 for one in values) / (n - 1)) ** 0.5 if n > 1 else 0.0
    half = T_95[n - 2] * deviation / n**0.5 if n > 1 else 0.0
    return [round(one, 4) for one in (mean, mean - half, mean + half)]


def span(values: list[float]) -> list[float]:
    """Return the mean, the least and the largest value: three seeds have no useful interval."""
    return [round(one, 4) for one in (sum(values) / len(values), min(values), max(values))]


def judge(rows: list[Row], gates: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the figures of all rows, and the gates that are not met."""
    missed: list[str] = []
    fallen: list[str] = []
    figures: dict[str, Any] = {"rounds": {}, "fallen": fallen, "splits": {}, "wrong": {},
                               "unlike": {}, "few": {}}  # fmt: skip
    by = lambda **keys: [r for r in rows if all(r.get(k) == v for k, v in keys.items())]  # noqa: E731
    for model, own in rounds_gates(gates).items():
        first = {
            method: {r["seed"]: reached(r, gates) for r in by(part="rounds", model=model, method=method)}
            for method in ("fedavg", "scaffold")
        }  # fmt: skip
        both = sorted(first["fedavg"].keys() & first["scaffold"].keys())
        wins = sum(first["scaffold"][seed] < first["fedavg"][seed] for seed in both)
        figures["rounds"][model] = {
            **{method: [of[seed] for seed in both] for method, of in first.items()}, "wins": wins
        }  # fmt: skip
        if len(both) == len(own["seeds"]) and wins < own["wins"]:
            line = f"rounds, {model}: SCAFFOLD first in {wins} of {len(both)} seeds"
            (fallen if model == REPLACED else missed).append(line)
    for split in gates["splits"]["splits"]:
        for method in gates["splits"]["methods"]:
            found = by(part="splits", split=split, method=method)
            if found:
                figures["splits"][f"{split} {method}"] = {
                    "seeds": len(found),
                    "accuracy": interval([row["curve"][-1] for row in found]),
                    "least": min(row["curve"][-1] for row in found),
                    "refused": sum(row["refused"] for row in found),
                }
    honest = [*by(part="splits"), *by(part="rounds")]
    if refused := sum(row["refused"] for row in honest):
        missed.append(f"honest owners were refused {refused} times")
    points = gates["wrong"]["points"]
    for merge in gates["wrong"]["merges"]:
        right = {r["seed"]: r["curve"][-1] for r in by(part="wrong", merge=merge, fault="none")}
        if right:
            figures["wrong"][f"{merge} none"] = {"accuracy": interval([*right.values()])}
        for fault in gates["wrong"]["faults"]:
            found = [r for r in by(part="wrong", merge=merge, fault=fault) if r["seed"] in right]
            if not found:
                continue
            lost = [100 * (right[r["seed"]] - r["curve"][-1]) for r in found]
            figures["wrong"][f"{merge} {fault}"] = {
                "accuracy": interval([r["curve"][-1] for r in found]),
                "lost_points": [round(one, 2) for one in lost],
                "mean_lost": round(sum(lost) / len(lost), 2),
            }
            if merge != "mean" and sum(lost) / len(lost) > points:
                missed.append(f"wrong, {merge}, {fault}: {sum(lost) / len(lost):.2f} points lost")
    figures["few"] = sum_up_few(by(part="few"), gates["unlike"]["few"])
    figures["unlike"] = sum_up_unlike(by(part="unlike"), gates["wrong"]["owners"] - 1)
    return figures, missed


def sum_up_few(rows: list[Row], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of the part `few`, which no gate judges."""
    of: dict[str, list[list[float]]] = {}
    for row in rows:
        epochs = f"{row['epochs']} epoch{'s' * (row['epochs'] > 1)} a round"
        of.setdefault(f"{row['split']} {row['method']}, {epochs}", []).append(row["curve"])
    return {
        name: {
            str(number): span([curve[number - 1] for curve in curves])
            for number in settings["rounds"]
        }
        for name, curves in sorted(of.items())
    }


def sum_up_unlike(rows: list[Row], wrong: int) -> dict[str, Any]:
    """Return the figures of the part `unlike`, which no gate judges.

    Points lost are those beside the mean of five right owners with the same seed, so of the same deal.
    """
    found: dict[str, dict[int, tuple[float, float, float | None]]] = {}
    for row in rows:
        at, owners = str(wrong), row["by_owner"]
        others = [one for name, one in owners.items() if name != at]
        targets = sum(count for _, count in others)
        right = sum(accuracy * count for accuracy, count in others) / targets
        own = owners[at][0] if at in owners else None  # it may hold out no sample
        name = f"{row['split']} {row['merge']} {row['fault']}"
        found.setdefault(name, {})[row["seed"]] = (row["curve"][-1], right, own)
    figures = {}
    for name, by_seed in found.items():
        base = found.get(f"{name.split()[0]} mean none", {})
        lost = [100 * (base[seed][0] - one[0]) for seed, one in by_seed.items() if seed in base]
        accuracy, others, own = (
            interval([one for one in values if one is not None])
            for values in zip(*by_seed.values(), strict=True)
        )
        figures[name] = {
            "accuracy": accuracy, "others": others, "own": own,
            "lost_points": [round(one, 2) for one in lost],
            "mean_lost": round(sum(lost) / len(lost), 2) if lost else None,
        }  # fmt: skip
    return figures


def warm() -> None:
    """Import what every trial needs, once."""
    import sklearn.datasets  # noqa: F401
    import torch
    import torch._dynamo  # noqa: F401

    import shoal.cli.start  # noqa: F401
    import shoal.trainer.main_job  # noqa: F401

    torch.set_num_threads(1)


def tell_apart(one: dict[str, Any]) -> str:
    """Return what tells a trial from all others."""
    return json.dumps(
        {
            k: one.get(k)
            for k in ("part", "model", "split", "merge", "fault", "method", "seed", "epochs")
        }
    )


def add_row(row: Row | None, gates_hash: str, gates: dict[str, Any]) -> dict[str, Any]:
    """Add a row to the result, which several processes may write; return the whole record."""
    TARGET.touch()
    with TARGET.open("r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        record = json.loads(file.read() or "{}")
        rows = record.get("trials", []) if record.get("gates") == gates_hash else []
        second_hash = gates["second_hash"]
        if record.get("second_gates") != second_hash:
            rows = [one for one in rows if one.get("model") != SECOND_MODEL]
        unlike_hash = gates["unlike_hash"]
        if record.get("unlike_settings") != unlike_hash:
            rows = [one for one in rows if one["part"] not in ("unlike", "few", "labels")]
        taken = {tell_apart(one) for one in rows}
        rows += [row] if row and tell_apart(row) not in taken else []
        rows.sort(key=tell_apart)
        figures, missed = judge(rows, gates)
        sources = dict(Counter(one["source"] for one in rows))
        record = {"gates": gates_hash, "second_gates": second_hash,
                  "unlike_settings": unlike_hash, "sources": sources,
                  "machine": machine(), "figures": figures, "missed": missed, "trials": rows}  # fmt: skip
        file.seek(0)
        file.truncate()
        file.write(json.dumps(record, indent=1) + "\n")
    return record


def short_hash(text: str) -> str:
    """Return the first 16 digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> int:
    """Make the trials that are missing, write every row, judge."""
    os.chdir(HERE)  # model.build is found from the working folder
    parts = sys.argv[1:] or ["rounds", "splits", "wrong", "unlike", "few"]
    text = GATES.read_text(encoding="utf-8")
    gates, gates_hash = tomllib.loads(text), short_hash(text)
    text = SECOND.read_text(encoding="utf-8")
    gates |= {"second": tomllib.loads(text), "second_hash": short_hash(text)}
    text = UNLIKE.read_text(encoding="utf-8")
    gates |= {"unlike": tomllib.loads(text), "unlike_hash": short_hash(text)}
    source = source_hash()
    warm()
    wanted = [one for one in trials(gates) if one["part"] in parts]
    random.shuffle(wanted)  # so that processes that run at the same time make different ones
    for trial in wanted:
        known = {tell_apart(row) for row in add_row(None, gates_hash, gates)["trials"]}
        if tell_apart(trial) not in known:
            row = run_trial(trial, gates["wrong"]["owners"]) | {"source": source}
            add_row(row, gates_hash, gates)
            sys.stderr.write(json.dumps({**row, "curve": row["curve"][-1:]}) + "\n")
    record = add_row(None, gates_hash, gates)
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    sys.stderr.write(json.dumps(record["figures"], indent=1) + "\n")
    sys.stderr.write(f"{own.ru_utime + own.ru_stime:.0f} CPU s; missed: {record['missed']}\n")
    return 1 if record["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
