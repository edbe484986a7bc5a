"""The user's own modules and data: what is at fault decides whether a restart may help."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.base.errors import ClusterError, ConfigError, UserError
from shoal.config.sections import DataSection, ModelSection
from shoal.data.fetch import Failure, load_error, sample_kind
from shoal.data.sources import open_source
from shoal.trainer.job import build_model, import_object

FLOATS = [(torch.zeros(1, 8, 8), 3)] * 4
IDS = [(torch.arange(8), torch.arange(8))] * 4


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.EIO, "Input/output error"), ClusterError),
        (TimeoutError("timed out"), ClusterError),
        (ConnectionResetError("peer"), ClusterError),
        (FileNotFoundError(errno.ENOENT, "No such file"), UserError),
        (OSError("image file is truncated"), UserError),
        (ValueError("odd"), UserError),
    ],
)
def test_a_disk_may_work_again_a_mistake_does_not(error: Exception, kind: type) -> None:
    failure = load_error("data.source: sample 3", error)
    assert type(failure) is kind
    assert str(failure).startswith(f"data.source: sample 3: {type(error).__name__}: ")
    with pytest.raises(kind) as caught:
        Failure.of(failure).raise_again()  # as from a loader process
    assert (str(caught.value), caught.value.__notes__) == (str(failure), failure.__notes__)


@pytest.mark.parametrize(
    ("data", "kind"),
    [(FLOATS, "images"), ([torch.zeros(3)], "numbers"), (IDS, "tokens"), ([{"x": 1}], "tokens"),
     ([], "tokens"), (iter(FLOATS), "tokens")],
)  # fmt: skip
def test_what_the_first_sample_tells(data: Any, kind: str) -> None:
    assert sample_kind(data) == kind


def test_a_language_model_on_images_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_samples.py").write_text(
        "import torch\n"
        "def images(): return [(torch.zeros(1, 8, 8), 3)] * 4\n"
        "def ids(): return [(torch.arange(8), torch.arange(8))] * 4\n"
    )
    images = open_source(DataSection(source="my_samples:images"), 0)
    ids = open_source(DataSection(source="my_samples:ids"), 0)
    small = {"dim": 8, "layers": 1, "heads": 2}
    with pytest.raises(ConfigError) as caught:
        build_model(ModelSection(arguments=small), images, 8)
    assert str(caught.value) == (
        "model.name = llama: reads tokens, data.source = my_samples:images gives images; "
        "nearest: model.name=resnet or model.name=vit"
    )
    assert build_model(ModelSection(name="resnet"), images, 8)
    assert build_model(ModelSection(arguments=small), ids, 8), "ids of the user's own are tokens"


def test_a_builder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        import_object("model.build", "json:laods")
    assert str(caught.value) == "model.build = json:laods: json has no laods; nearest: json:loads"
    (tmp_path / "my_broken.py").write_text("import nowhere_at_all\n")
    with pytest.raises(ConfigError) as caught:
        import_object("model.build", "my_broken:build")
    assert "importing my_broken raises ModuleNotFoundError" in str(caught.value)
    assert "my_broken.py" in caught.value.__notes__[0], "the traceback is for the log"
    (tmp_path / "my_again.py").write_text("from json import *\n")
    assert import_object("model.build", "my_again:loads"), "a name may come from elsewhere"
