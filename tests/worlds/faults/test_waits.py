"""In a step the host waits for the device once: in the step's one all-reduce of numbers."""

from __future__ import annotations

from typing import Any

import pytest

TALLY = "tolist at trainer/step/optimizer_step.py:"
ON_A_CPU = (
    "models/loss.py:", "parallel/tensor_parallel/vocabulary_parallel.py:", "numpy at trainer/guards/external_writes.py:",
    "numpy at trainer/guards/checksums.py:",  # of the host's tensors: a device's are summed there
    "numpy at trainer/step/micro_batch.py:",  # loss and count
    "aten::_local_scalar_dense at trainer/step/micro_batch.py:",
    "data/loading/dataset_kind.py:",  # of batches on the host, in a run's first steps
    "parallel/dropout_rng.py:",  # states of generators, which lie on the host
)  # fmt: skip
"""Places that read values behind `device.type == "cpu"`, where a read costs nothing."""

LAYOUTS: list[Any] = [
    *((2, layout) for layout in ("ddp", "zero2", "fsdp", "tp", "pp")),
    *(pytest.param(*row, marks=pytest.mark.proof) for row in ((2, "zero1"), (4, "hsdp"))),
]
SHORT = [(2, "fsdp")]  # of loops: gradients are summed as in the steps above
LOOPS = [
    pytest.param(*row, marks=[] if row in SHORT else [pytest.mark.proof])
    for row in (*((2, name) for name in ("ddp", "zero1", "zero2", "fsdp", "tp")), (4, "hsdp"))
]
COUNT = 7


def on_a_device(told: list[list[list[str]]]) -> list[list[list[str]]]:
    """Without what is asked of a CPU alone: by rank, by step."""
    return [[[w for w in one if not any(p in w for p in ON_A_CPU)] for one in own] for own in told]


@pytest.mark.parametrize(("size", "layout"), LAYOUTS, ids=str)
def test_the_host_waits_once(worlds: Any, size: int, layout: Any) -> None:
    for own in on_a_device(worlds(size).call("waits_case:steps", layout=layout, count=COUNT)):
        for step in (5, 6):
            assert len(own[step - 1]) == 1, own[step - 1]
            assert own[step - 1][0].startswith(TALLY)
        # Before steps 1, 2, 4, 8, … all weights are read: once when one is over, and once or twice
        # as the next begins, however many tensors there are.
        assert len(own[2]) + len(own[3]) <= 5, own[2] + own[3]
        assert len(own[6]) <= 2, own[6]


@pytest.mark.parametrize(("size", "layout"), LOOPS, ids=str)
def test_the_host_waits_twice_in_a_loop_written_out(worlds: Any, size: int, layout: Any) -> None:
    """At the end of the passes, whose mean the loop may change, and for the norm of what it left."""
    told = worlds(size).call("waits_case:steps", layout=layout, count=6, own_loop=True)
    for own in on_a_device(told):
        for step in (5, 6):
            assert len(own[step - 1]) == 2, own[step - 1]
            assert own[step - 1][0].startswith(TALLY)
