"""Plan of a run: its program, as data that can be saved, compared and executed.

run.toml, the command line and `shoal.parallelize` make it, the planner ranks it, the proof and the
trainer execute it, and plan.json stores it. It has the layout, the division of a batch, every
policy and the gradient buckets. Two runs with equal plans send the same bytes in the same order, so
a resume on the same layout is exact to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from shoal.base.layouts.layout import Layout
from shoal.base.layouts.policies import POLICIES, Policies, lists_as_tuples
from shoal.base.plans.placement import Placement
from shoal.base.text.units import count_text


@dataclass(frozen=True)
class Bucket:
    """A gradient bucket: the parameters, by name, whose gradients lie in one flat buffer, in order.

    Attributes:
        elements: elements of the buffer, padding included.
        dtype: dtype of the gradients and of their sum.
        compute: dtype of the copies that forward passes read; "" if they read the weights.
        cuts: boundaries of the ranks' shares under zero1 and zero2, ranks + 1 of them; ()
            otherwise.
    """

    names: tuple[str, ...]
    elements: int
    dtype: str
    element_bytes: int
    cuts: tuple[int, ...] = ()
    compute: str = ""

    @property
    def payload_bytes(self) -> int:
        """Size of the buffer in bytes."""
        return self.elements * self.element_bytes


@dataclass(frozen=True)
class Plan(Policies):
    """One run's program, as data: its layout, and every policy's key by its name in run.toml.

    Attributes:
        layout: degrees of every axis.
        batch: samples per optimizer step, all ranks.
        micro_batch: samples per forward pass on one data rank; 0 if not set: defaults of
            `shoal.parallelize`.
        accumulate: micro-batches per data rank in a full step; 0: derived.
        why: one line: the rule that chose the layout, and the alternatives.
        parameters: trainable elements.
        placements: a row per parameter and buffer of the model; made at the start of a run.
        buckets: gradient buffers, in sending order; made at the start of a run.
    """

    layout: Layout
    batch: int = 0
    micro_batch: int = 0
    accumulate: int = 0
    why: str = ""
    parameters: int = 0
    placements: tuple[Placement, ...] = ()
    buckets: tuple[Bucket, ...] = ()

    @property
    def sums_parts_each_pass(self) -> bool:
        """True if a pass ends with sums of its gradients' parts, as under zero 2."""
        return self.layout.zero == 2 and not self.defer_sync

    def arithmetic(self) -> str:
        """Return the batch equation with this run's numbers.

        >>> Plan(Layout(dp_replicate=2), 16, 4, 2).arithmetic()
        '2 ranks × 2 micro-batches × 4 samples = 16 samples per step'
        """
        ranks = self.layout.data_degree
        return (
            f"{ranks} rank{'s' if ranks > 1 else ''} × {self.accumulate} micro-batch"
            f"{'es' if self.accumulate > 1 else ''} × {self.micro_batch} samples = "
            f"{self.batch} samples per step"
        )

    def __str__(self) -> str:
        """Return the plan in five lines: layout, batch, formats, policies that are set, the reason.

        >>> print(Plan(Layout(dp_replicate=2), 16, 4, 2, "ddp: asked for", 1200, clip=1.0))
        layout      ddp (dp_replicate = 2)
        batch       2 ranks × 2 micro-batches × 4 samples = 16 samples per step
        parameters  1.2K in auto, 0 tensors in 0 buckets
        policies    clip=1.0
        why         ddp: asked for
        """
        said = {
            name: getattr(self, name)
            for name, policy in POLICIES.items()
            if getattr(self, name) != policy.default and name != "compute"
        }
        buckets = f"{len(self.buckets)} bucket{'s' if len(self.buckets) != 1 else ''}"
        rows = {
            "layout": self.layout.text(),
            "batch": self.arithmetic() if self.accumulate else f"{self.batch} samples per step",
            "parameters": f"{count_text(self.parameters)} in {self.compute}, "
            f"{len(self.placements)} tensors in {buckets}",
            "policies": " ".join(f"{key}={value}" for key, value in said.items()) or "defaults",
            "why": self.why or "given",
        }
        return "\n".join(f"{name:<12}{text}" for name, text in rows.items())

    def to_json(self, beside: Mapping[str, Any] | None = None) -> str:
        """Return the plan as indented JSON; `from_json` restores an equal plan.

        Args:
            beside: further entries on the run for readers of the file; the plan's own keys win.

        >>> json.loads(Plan(Layout(), 8).to_json({"batch": 4, "steps": 3}))["batch"]
        8
        """
        record = {**asdict(self), "strategy": self.layout.strategy}
        further = {key: value for key, value in (beside or {}).items() if key not in record}
        return json.dumps({**record, **further}, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Parse the JSON of `to_json`; entries outside the plan are ignored.

        Args:
            text: JSON of `to_json`, of this version or of an earlier one.

        Raises a ValueError, KeyError or TypeError for a text that is no plan.

        >>> plan = Plan(Layout(), 4, 4, 1, split=("*=row",), buckets=(Bucket(("w",), 3, "f", 4),))
        >>> Plan.from_json(plan.to_json({"steps": 3})) == plan
        True
        """
        record: dict[str, Any] = json.loads(text)
        found = {key.name: record[key.name] for key in fields(Plan) if key.name in record}
        found["layout"] = Layout(**found["layout"])
        found |= lists_as_tuples({key: found[key] for key in POLICIES if key in found})
        found["placements"] = tuple(map(Placement.of_record, found.get("placements", ())))
        found["buckets"] = tuple(
            Bucket(**{**b, "names": tuple(b["names"]), "cuts": tuple(b["cuts"])})
            for b in found.get("buckets", ())
        )
        return Plan(**found)
