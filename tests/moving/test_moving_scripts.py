"""Plain scripts of other kinds and Shoal's form of them: the page shows the change, both compute one.

A script of tests/moving/before_NAME.py is what somebody brings: one process, no Shoal. It is
compared with examples/NAME.py, which tests/trainer/test_examples.py runs on two processes and resumed.
"""

from __future__ import annotations

import difflib
import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import alike
import pytest
import torch

from shoal.data.loading.sample_order import permute

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "reference" / "moving-in.md"
SHORT = ("--short", "--float64")
NUMBER = re.compile(r"\d+\.\d{4,}(?:e-\d+)?")
"""Of a line: what is printed to its last digit."""

SHOWN = {
    "sft": "\nrows = |\ndata = ",
    "lora": "\ndef ",
    "digits_best": "\nmodel = ",
    "distillation": "\nadam = torch.optim.AdamW",
    "gan": "\nadams = ",
    "ppo": "\nmodel = ",
}
"""Where the part begins that the page shows; what is above differs by headers, imports, switches."""


def both(name: str) -> tuple[Path, Path]:
    return HERE / f"before_{name}.py", ROOT / "examples" / f"{name}.py"


def change(name: str) -> str:
    """The diff from the plain script to Shoal's, from where `SHOWN` says; … for what is equal."""
    texts = [path.read_text() for path in both(name)]
    parts = [text[re.search(SHOWN[name], text).start() + 1 :].splitlines() for text in texts]
    lines = list(difflib.unified_diff(*parts, n=1, lineterm=""))[3:]
    return "\n".join("…" if line.startswith("@@") else line.rstrip() for line in lines) + "\n"


@pytest.mark.parametrize("name", SHOWN)
def test_the_page_shows_the_change(name: str) -> None:
    shown = re.search(rf"<!-- {name} -->\n+```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
    wanted = change(name)
    assert shown is not None
    assert shown[1] == wanted, f"docs/reference/moving-in.md should show:\n{wanted}"


@pytest.mark.parametrize("name", SHOWN)
def test_the_plain_script_knows_no_shoal(name: str) -> None:
    plain = both(name)[0].read_text()
    assert "shoal" not in plain
    assert "rank" not in plain


@pytest.mark.proof
@pytest.mark.parametrize("name", ["distillation", "gan", "ppo", "digits_best"])
def test_both_compute_the_same(name: str, tmp_path: Path) -> None:
    """In float64, of a short run: what is printed to its last digit, and every weight."""
    given: dict[str, list[alike.Patch]] = {
        "distillation": [alike.order()],
        "gan": [alike.order(), alike.noise(8, 16)],
        "ppo": [],  # it draws by a generator of its own
        "digits_best": [alike.order(), alike.dropout("2", 8)],
    }
    models = {"distillation": ["student"], "gan": ["maker", "judge"]}.get(name, ["model"])
    if name == "digits_best":
        pytest.importorskip("tensorboard")
    plain, ours = both(name)
    (tmp_path / "plain").mkdir()
    left, told = alike.run(plain, str(tmp_path / "plain"), *SHORT, given=given[name])
    left_by_ours, told_by_ours = alike.run(ours, str(tmp_path / "ours"), *SHORT)
    near = {"abs": 1e-11} if name == "ppo" else {"rel": 1e-11}  # ppo's loss is nearly 0
    assert numbers(told)
    assert numbers(told_by_ours) == pytest.approx(numbers(told), **near)
    for model in models:
        assert_close(left_by_ours[model], left[model])


@pytest.mark.proof
def test_packed_rows_train_on_what_padded_batches_do(tmp_path: Path) -> None:
    """The plain script holds out the same questions, and its batch has the examples of eight rows."""
    pytest.importorskip("transformers")
    plain, ours = both("sft")
    left_by_ours, told_by_ours = alike.run(
        ours, str(tmp_path), *SHORT, given=alike.llama_in_float64()
    )
    data = left_by_ours["data"]
    unseen = {data.tokenizer.decode(ids) for ids in examples(data.validation)}
    lines = (tmp_path / "questions.jsonl").read_text().splitlines()
    parts: tuple[list[Any], list[Any]] = ([], [])
    for row in map(json.loads, lines):
        parts[row["prompt"] + row["completion"] in unseen].append(row)
    assert [len(part) for part in parts] == [data.train.examples, data.validation.examples]

    def batches(epoch: int) -> list[list[int]]:
        rows = permute(range(len(data.train)), len(data.train), seed=0, epoch=epoch).tolist()
        some = [rows[at : at + 8] for at in range(0, len(rows), 8)]
        return [[n for row in batch for n in data.train.examples_of(row)] for batch in some]

    split = mock.patch.object(torch.utils.data, "random_split", return_value=parts)
    given = [alike.batches(batches), split, *alike.llama_in_float64()]
    left, told = alike.run(plain, str(tmp_path), *SHORT, given=given)
    assert numbers(told_by_ours) == pytest.approx(numbers(told), rel=1e-11)
    assert_close(left_by_ours["model"], left["model"])
    answers = {data.tokenizer.decode([t]) for t in data.train[0][1].tolist() if t != -100}
    assert len(answers) > 2, "a row's answers are words, not their ends alone"


def examples(rows: Any) -> list[list[int]]:
    """The tokens of each."""
    bounds = zip(rows.starts, rows.stops, strict=True)
    return [rows.ids[start:stop].tolist() for start, stop in bounds]


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore")
def test_adapters_learn_the_same(tmp_path: Path) -> None:
    """Pretrained by each; tuned by both from what the plain script saved."""
    pytest.importorskip("peft")
    plain, ours = both("lora")
    folders = [str(tmp_path / name) for name in ("plain", "ours")]
    for do in ("pretrain", "tune"):
        given = [alike.order(), *alike.llama_in_float64()]
        _, told = alike.run(plain, do, folders[0], *SHORT, given=given)
        if do == "tune":
            shutil.copytree(tmp_path / "plain" / "base", tmp_path / "ours" / "base")
        _, told_by_ours = alike.run(ours, do, folders[1], *SHORT, given=alike.llama_in_float64())
        assert numbers(told)
        assert numbers(told_by_ours) == pytest.approx(numbers(told), rel=1e-11)


def numbers(told: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(told)]


def assert_close(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    wanted = theirs.state_dict()
    assert ours.state_dict().keys() == wanted.keys()
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == torch.float64
        assert torch.allclose(tensor, wanted[name], rtol=0, atol=1e-10), name
