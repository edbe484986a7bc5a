"""Records of replayed steps: numbers of each step, and a digest and a norm of every tensor.

    steps   a row per step: loss, gradient norm, learning rate, targets, skipped, samples
    tensors per step, in the order of time:
        weights before   parameters and buffers that the step met
        forward          outputs of the model's parts, in the order of their calls
        gradients        of the mean loss, before clipping
        weights after    what it left

A digest is SHA-256 of a tensor's bytes, shortened to 16 hex digits; two equal digests are equal
bits. A sketch is four sums of the elements under fixed random signs: the differences of two
sketches estimate the norm of the difference of two tensors. No torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError
from shoal.base.runlog.atomic_files import write_atomically
from shoal.base.runlog.damaged_lines import Record, read_object

FORMAT, VERSION = "shoal-step-record", 1
BEFORE, FORWARD, GRADIENTS, AFTER = "weights before", "forward", "gradients", "weights after"
KINDS = (BEFORE, FORWARD, GRADIENTS, AFTER)
"""Kinds of tensors of a step, in the order in which it computes them."""
DATA = ("samples", "tokens")
"""Keys of a row that tell which data a step met."""
NUMBERS = (*DATA, "loss", "grad_norm", "lr", "skipped")
"""Keys of a row of metrics.jsonl that repeat to the bit, data first: a loss follows from it."""


@dataclass(frozen=True)
class TensorMark:
    """One tensor of a step, or all outputs of a part: shape, digest of the bytes, Euclidean norm.

    Attributes:
        count: elements; of outputs of all micro-batches and ranks, while the shape is of one.
        sketch: sums under fixed random signs; () in records of older versions.
    """

    shape: tuple[int, ...]
    digest: str
    norm: float
    count: int
    sketch: tuple[float, ...] = ()


Marks = dict[str, TensorMark]


@dataclass
class StepMarks:
    """Tensors of one step by kind and name, each kind in its order of time."""

    step: int
    marks: dict[str, Marks] = field(default_factory=dict)


@dataclass
class StepRecord:
    """Steps of one replay.

    Attributes:
        run: path of the run, as the user wrote it.
        layout, processes, compute: how the steps were repeated.
        rows: a row of numbers per step, by step.
        steps: tensors per recorded step.
        environment: versions, sources and machine, by key (`run_environment.py`).
        micro_batch: samples of a micro-batch; 0 in records of older versions.
        repeats_bits: the devices of the replay repeat their sums to the bit.
    """

    run: str
    layout: str
    processes: int
    compute: str
    rows: dict[int, Record] = field(default_factory=dict)
    steps: dict[int, StepMarks] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    micro_batch: int = 0
    repeats_bits: bool = True

    def write(self, path: Path) -> None:
        """Write the record as one JSON file.

        Raises:
            ConfigError: the file cannot be written.
        """
        check_target(path)
        whole = {"format": FORMAT, "version": VERSION, **asdict(self)}
        try:
            write_atomically(path, json.dumps(whole, indent=1) + "\n")
        except OSError as failure:
            raise ConfigError(f"--record {path}: {failure.strerror or failure}") from failure


def check_target(path: Path) -> None:
    """Refuse to write a record over a file that is none, or into a folder that is not there.

    Raises:
        ConfigError: names a path that is free.
    """
    if path.is_dir() or not path.parent.is_dir():
        free = path / "step.json" if path.is_dir() else path.name
        what = "is a folder" if path.is_dir() else f"{path.parent} is no folder"
        raise ConfigError(f"--record {path}: {what}; try: --record {free}")
    if path.exists() and read_object(path).get("format") != FORMAT:
        free = path.with_name(f"{path.stem}-record.json")
        raise ConfigError(f"--record {path}: exists and is no record; try: --record {free}")


def read_record(path: Path) -> StepRecord:
    """Read a record that `StepRecord.write` wrote.

    Raises:
        ConfigError: the file is no such record, or one of a newer version.
    """
    found = read_object(path)
    if found.get("format") != FORMAT:
        raise ConfigError(
            f"{path}: is no record of steps; try: a file that shoal replay RUN --step N --record "
            f"FILE wrote, or the folder of a run"
        )
    if found.get("version") != VERSION:
        raise ConfigError(f"{path}: was written by another version of Shoal; record it again")
    try:
        return StepRecord(
            run=str(found["run"]),
            layout=str(found["layout"]),
            processes=int(found["processes"]),
            compute=str(found["compute"]),
            rows={int(step): dict(row) for step, row in found["rows"].items()},
            steps={int(step): parse_marks(marks) for step, marks in found["steps"].items()},
            environment={str(key): str(value) for key, value in found["environment"].items()},
            micro_batch=int(found.get("micro_batch", 0)),
            repeats_bits=bool(found.get("repeats_bits", True)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as damage:
        raise ConfigError(f"{path}: is damaged ({damage!r}); record it again") from damage


def parse_marks(found: Any) -> StepMarks:
    """Return the tensors of one step from their JSON.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it has another form.
    """
    marks = {
        str(kind): {
            str(name): TensorMark(
                tuple(one["shape"]),
                str(one["digest"]),
                float(one["norm"]),
                int(one["count"]),
                tuple(map(float, one.get("sketch", ()))),
            )
            for name, one in named.items()
        }
        for kind, named in found["marks"].items()
    }
    return StepMarks(int(found["step"]), marks)


def relative_gap(first: TensorMark, second: TensorMark, whole: float = 0.0) -> float:
    """Return the estimated norm of the difference of two tensors, as a share of a norm.

    Records of older versions have no sketch; then the difference of the norms is a lower bound.

    Args:
        whole: the norm; 0: that of the larger tensor.

    Returns:
        A share; inf if a norm is not finite.

    >>> one = TensorMark((2,), "a", 5.0, 2, (7.0, -1.0))
    >>> relative_gap(one, TensorMark((2,), "b", 5.0, 2, (1.0, 7.0))), relative_gap(one, one)
    (1.4142135623730951, 0.0)
    """
    norms = (first.norm, second.norm)
    if not all(math.isfinite(one) for one in norms):
        return math.inf
    distance = abs(norms[0] - norms[1])
    if first.sketch and len(first.sketch) == len(second.sketch):
        pairs = zip(first.sketch, second.sketch, strict=True)
        distance = math.sqrt(sum((a - b) ** 2 for a, b in pairs) / len(first.sketch))
    return distance / max(whole or max(norms), 1e-300)


def whole_norm(marks: Marks) -> float:
    """Return the norm of all tensors together."""
    return math.sqrt(sum(one.norm**2 for one in marks.values()))
