"""A loss that gathers the samples of all ranks over `run.mesh` equals one process's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (4, {"tp": 2, "dp_replicate": 2}),
    (4, {"cp": 2, "dp_replicate": 2}),
    (4, {"tp": 2, "dp_shard": 2, "zero": 2}),
    (4, {"tp": 2, "dp_shard": 2, "zero": 3}),
    (4, {"cp": 2, "dp_shard": 2, "zero": 3}),
    (4, {"cp": 2, "dp_shard": 2, "context": "ulysses"}),
    (4, {"dp_replicate": 2, "dp_shard": 2}),
    (4, {"dp_replicate": 4}),
    (4, {"pp": 2, "dp_replicate": 2}),
    (2, {"tp": 2}),
]
SHORT = LAYOUTS[2:3]


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [pytest.param(*row, marks=[] if row in SHORT else pytest.mark.proof) for row in LAYOUTS],
    ids=str,
)
def test_it_equals_the_whole_batch_in_plain_torch(
    worlds, ranks: int, layout: dict[str, Any]
) -> None:
    (plain,) = worlds(1).call("mesh_case:plain")
    for found in worlds(ranks).call("mesh_case:trained", layout=layout):
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-12)
        for name, wanted in plain["weights"].items():
            got = torch.tensor(found["weights"][name], dtype=torch.float64)
            want = torch.tensor(wanted, dtype=torch.float64)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
        assert not [line for line in found["lines"] if line.startswith("loss")]
