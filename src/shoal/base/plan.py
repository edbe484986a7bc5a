"""The plan is the program: what a run will do, as data that can be saved, compared and executed.

The planner writes it, the trainer executes it, the report draws it. It holds the layout, the
micro-batch arithmetic and the gradient buckets; two runs with equal plans send the same bytes in
the same order, which is what makes a resume on the same layout exact to the bit.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.base.layout import Layout
from shoal.base.policies import TensorPolicy


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together: parameter names in the order of their places.

    elements   of the buffer, padding included · dtype  of the gradients and of their sum
    compute    type of the copies that forward passes read; "" where they read the weights
    cuts       where each rank's share begins and ends under zero1 and zero2; () elsewhere
    """

    names: tuple[str, ...]
    elements: int
    dtype: str
    element_bytes: int
    cuts: tuple[int, ...] = ()
    compute: str = ""

    @property
    def payload_bytes(self) -> int:
        """Size of the buffer."""
        return self.elements * self.element_bytes


@dataclass(frozen=True)
class Plan:
    """One run's program.

    layout        degrees of every axis
    why           one line: which rule chose it and what else was possible
    batch         samples per optimizer step, all ranks · micro_batch  samples per forward pass
    accumulate    micro-batches per data rank in a full step
    precision     format of matrix products · reduce  format in which gradients are summed
    recompute     activations that are computed twice: none, selective, full
    offload       what waits in the host's memory: none, optimizer, parameters, activations
    compile       what becomes fused kernels: none, blocks
    defer_sync    zero2, zero3: gradients are summed once a step, at the cost of one full copy
    compress      what gradients travel as: none, int8, powersgd:RANK, topk:SHARE
    tensor        how layers are split over tp
    parameters    trainable elements · buckets  gradient buffers, in sending order
    """

    layout: Layout
    why: str
    batch: int
    micro_batch: int
    accumulate: int
    precision: str
    parameters: int
    buckets: tuple[Bucket, ...] = field(default=())
    reduce: str = ""
    recompute: str = "none"
    offload: str = "none"
    compile: str = "none"
    defer_sync: bool = False
    compress: str = "none"
    tensor: TensorPolicy = TensorPolicy()

    def arithmetic(self) -> str:
        """The batch equation with this run's numbers.

        >>> Plan(Layout(dp_replicate=2), "", 16, 4, 2, "fp32", 10).arithmetic()
        '2 ranks × 2 micro-batches × 4 samples = 16 samples per step'
        """
        ranks = self.layout.data_degree
        return (
            f"{ranks} rank{'s' if ranks > 1 else ''} × {self.accumulate} micro-batch"
            f"{'es' if self.accumulate > 1 else ''} × {self.micro_batch} samples = "
            f"{self.batch} samples per step"
        )

    def to_json(self) -> str:
        """The plan as indented JSON; `from_json` gives it back equal."""
        record = asdict(self)
        record["strategy"] = self.layout.strategy
        return json.dumps(record, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what `to_json` wrote.

        >>> plan = Plan(Layout(), "", 4, 4, 1, "fp32", 3, (Bucket(("w",), 3, "float32", 4),))
        >>> Plan.from_json(plan.to_json()) == plan
        True
        """
        record: dict[str, Any] = json.loads(text)
        record.pop("strategy", None)
        record["layout"] = Layout(**record["layout"])
        tensor = record.get("tensor", {})
        record["tensor"] = TensorPolicy(**{**tensor, "split": tuple(tensor.get("split", ()))})
        record["buckets"] = tuple(
            Bucket(**{**b, "names": tuple(b["names"]), "cuts": tuple(b["cuts"])})
            for b in record["buckets"]
        )
        return Plan(**record)
