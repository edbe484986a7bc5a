"""train.statistics: the numbers of every layout are those of one process, in float64 to 1e-12."""

from __future__ import annotations

from pathlib import Path

import pytest

import statistics_case
from shoal.fabric import start_world

LAYOUTS = {
    "ddp": ["ddp", "llama", {}],
    "fsdp": ["fsdp", "llama", {}],
    "tp": [{"tp": 2}, "llama", {}],
    "pp": [{"pp": 2}, "llama", {}],
    "cp": [{"cp": 2}, "llama", {}],
    "ep": [{"dp_shard": 2, "ep": 2}, "moe", {}],
}
KEYS = ["gradient_norm", "weight_norm", "update_ratio", "activation_rms", "activation_largest"]


def test_the_statistics_of_every_layout_are_those_of_one_process(worlds, tmp_path: Path) -> None:
    found = worlds(2).call("statistics_case:train_all", folder=str(tmp_path), layouts=LAYOUTS)[0]
    alone = {
        model: statistics_case.train(start_world({}), str(tmp_path / model), "single", model)
        for model in ("llama", "moe")
    }
    assert [one["step"] for one in alone["llama"]["lines"]] == [1, 3]
    assert list(alone["llama"]["lines"][0])[1:] == KEYS
    for name, (_, model, _) in LAYOUTS.items():
        gaps = statistics_case.differences(found[name]["lines"], alone[model]["lines"])
        assert max(gaps.values()) <= 1e-12, (name, gaps)
        for line in found[name]["lines"]:
            whole = sum(value**2 for value in line["gradient_norm"].values()) ** 0.5
            row = next(one for one in found[name]["rows"] if one["step"] == line["step"])
            assert whole == pytest.approx(row["grad_norm"], rel=1e-12)
