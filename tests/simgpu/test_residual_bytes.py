"""A bf16 residual stream keeps what FSDP2 keeps with `param_dtype` and `cast_forward_inputs`."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import world


def test_activations_are_those_of_fsdp2(forks: Any) -> None:
    told = world("residual_bytes.py", 2, (), {}, forks.start)
    for name in ("llama", "gpt"):
        for recompute, row in told[name].items():
            assert row["ours"] == pytest.approx(row["theirs"], rel=0.03), (name, recompute)
            assert row["wide"] > 1.08 * row["ours"], (name, recompute)
        assert told[name]["full"]["wide"] > 1.5 * told[name]["full"]["ours"]
