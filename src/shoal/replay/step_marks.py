"""Records of replayed steps: numbers of each step, and a digest and a norm of every tensor.

    steps   a row per step: loss, gradient norm, learning rate, targets, skipped, samples
    tensors per step, in the order of time:
        weights before   parameters and buffers that the step met
        forward          outputs of the model's parts, in the order of their calls
        gradients        the clipped mean that the optimizer saw
        weights after    what it left

A digest is SHA-256 of a tensor's bytes, shortened to 16 hex digits; two equal digests are equal
bits. The norm says how far two tensors are apart at most where they differ. No torch.
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
NUMBERS = ("loss", "grad_norm", "lr", "tokens", "skipped", "samples")
"""Keys of a row of metrics.jsonl that repeat to the bit."""


@dataclass(frozen=True)
class TensorMark:
    """One tensor of a step, or all outputs of a part: shape, digest of the bytes, Euclidean norm.

    Attributes:
        count: elements; of outputs of all micro-batches and ranks, while the shape is of one.
    """

    shape: tuple[int, ...]
    digest: str
    norm: float
    count: int


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
        environment: versions and sources, by key.
    """

    run: str
    layout: str
    processes: int
    compute: str
    rows: dict[int, Record] = field(default_factory=dict)
    steps: dict[int, StepMarks] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

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
    """Refuse to write a record over a file that is none.

    Raises:
        ConfigError: names a path that is free.
    """
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
                tuple(one["shape"]), str(one["digest"]), float(one["norm"]), int(one["count"])
            )
            for name, one in named.items()
        }
        for kind, named in found["marks"].items()
    }
    return StepMarks(int(found["step"]), marks)


def relative_gap(first: TensorMark, second: TensorMark) -> float:
    """Return the difference of two norms as a share of the larger; inf if one is not finite.

    >>> relative_gap(TensorMark((2,), "a", 1.0, 2), TensorMark((2,), "b", 2.0, 2))
    0.5
    """
    norms = (first.norm, second.norm)
    if not all(math.isfinite(one) for one in norms):
        return math.inf
    return abs(norms[0] - norms[1]) / max(*norms, 1e-300)
