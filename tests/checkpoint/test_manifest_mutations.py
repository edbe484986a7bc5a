"""Sixty mutations of a manifest, of which `make proof` does a thousand: no traceback, the file named."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import shoal
from shoal.base.errors import ShoalError

sys.path.append(str(Path(__file__).resolve().parents[1] / "proof"))

from manifest_mutations import sealed, trials


def test_no_mutation_ends_in_a_traceback(tmp_path: Path) -> None:
    found = trials(60, 1, tmp_path / "run")
    assert not found["wrong"], found["wrong"][:3]
    counts = found["counts"]
    assert counts["bytes: restore: refused"] == counts["bytes: verify: refused"] == 30
    # How many depends on the manifest: modules of this session's tests stand in it as the user's code,
    # and what differs of code is told and no reason to refuse.
    assert counts["sealed: restore: refused"] >= 5


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("optimizer", "changed"), [7], "`record.optimizer.changed[0]`"),
        (("optimizer", "changed"), [], "of 0 groups, `record.optimizer.groups` of 1"),
        (("epoch",), {"done": "x"}, "`record.epoch[...]`"),
    ],
)
def test_a_record_that_no_run_writes_is_refused(
    place: tuple[str, ...], value: object, said: str, tmp_path: Path
) -> None:
    model = torch.nn.Linear(8, 2)
    run = shoal.parallelize(
        model, torch.optim.AdamW(model.parameters()), batch=8, folder=tmp_path / "run"
    )
    for batch in run.loader([(torch.randn(8), torch.tensor(0)) for _ in range(16)]):
        run.step(batch)
    run.save()
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*/manifest.json")
    content = json.loads(saved.read_bytes())
    holder = content["record"]
    for key in place[:-1]:
        holder = holder[key]
    assert place[-1] in holder or place == ("epoch",)
    holder[place[-1]] = value
    saved.write_bytes(sealed(content))
    with pytest.raises(ShoalError, match=re.escape(said)) as refused:
        run.restore()
    assert "manifest.json" in str(refused.value)
    run.close()
