"""The user's own modules and data: what is at fault decides whether a restart may help."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.base.errors import ClusterError, ConfigError, UserError
from shoal.cli.workers.worker import worker_imports
from shoal.config.sections import Config, DataSection, ModelSection
from shoal.data.loading.dataset_kind import load_error
from shoal.data.loading.loader import Loader
from shoal.data.loading.sample_inspection import sample_kind
from shoal.data.loading.worker_pool import WorkerFailure
from shoal.data.sources import open_source
from shoal.trainer.jobs.configured_run import build_model, call_builder, import_object

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
        WorkerFailure.of(failure).raise_again()  # as from a loader process
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
    of_images, of_ids = (DataSection(source=f"my_samples:{name}") for name in ("images", "ids"))
    images, ids = open_source(of_images, 0), open_source(of_ids, 0)
    small = {"dim": 8, "layers": 1, "heads": 2}
    with pytest.raises(ConfigError) as caught:
        build_model(Config(ModelSection(arguments=small), data=of_images), images)
    assert str(caught.value) == (
        "model.name = llama: reads tokens, data.source = my_samples:images gives images; "
        "try: model.name=resnet or model.name=vit"
    )
    assert build_model(Config(ModelSection(name="resnet"), data=of_images), images)
    assert build_model(Config(ModelSection(arguments=small), data=of_ids), ids), (
        "ids of the user's own are tokens"
    )


def test_a_builder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        import_object("model.build", "json:laods")
    assert str(caught.value) == "model.build = json:laods: json has no laods; try: json:loads"
    (tmp_path / "my_broken.py").write_text("import nowhere_at_all\n")
    with pytest.raises(ConfigError) as caught:
        import_object("model.build", "my_broken:build")
    assert "importing my_broken raises ModuleNotFoundError" in str(caught.value)
    assert "my_broken.py" in caught.value.__notes__[0], "the traceback is for the log"
    (tmp_path / "my_again.py").write_text("from json import *\n")
    assert import_object("model.build", "my_again:loads"), "a name may come from elsewhere"


BUILDERS = """
import torch
def build(dim=4, depth=1): return torch.nn.Linear(dim, depth)
def needs(dim): return torch.nn.Linear(dim, 1)
def anything(**more): return torch.nn.Linear(4, 1)
def helper(): raise RuntimeError("broken on purpose")
def raises(): return helper()
"""


@pytest.mark.parametrize(
    ("builder", "arguments", "line"),
    [
        ("build", {"dimm": 3}, "model.dimm: my_builders:build() takes no argument dimm; "
                               "try: model.dim=3"),
        ("build", {"xyz": 3}, "model.xyz: my_builders:build() takes no argument xyz; "
                                "it takes dim, depth"),
        ("raises", {"width": 3}, "model.width: my_builders:raises() takes no argument width; "
                                 "it takes none"),
        ("needs", {}, "model.dim: my_builders:needs() needs it; try: model.dim=…"),
        ("build", {"dim": "x"}, None),
        ("raises", {}, "model.build = my_builders:raises: my_builders.py:6: RuntimeError: "
                       "broken on purpose"),
    ],
)  # fmt: skip
def test_a_builder_that_cannot_be_called_so_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    builder: str,
    arguments: dict[str, Any],
    line: str | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_builders.py").write_text(BUILDERS)
    monkeypatch.delitem(sys.modules, "my_builders", raising=False)
    assert call_builder("my_builders:anything", {"width": 3})
    assert call_builder("my_builders:build", {"dim": 3})
    with pytest.raises(ConfigError) as caught:
        call_builder(f"my_builders:{builder}", arguments)
    if line is None:
        assert str(caught.value).startswith("model.build = my_builders:build: my_builders.py:3: ")
    else:
        assert str(caught.value) == line


def test_validation_data_without_samples_are_refused_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_empty.py").write_text("def data(): return [(1.0, 2)] * 4, []\n")
    with pytest.raises(ConfigError, match="my_empty:data: its validation data has 0 samples"):
        open_source(DataSection(source="my_empty:data"), 0)


def test_a_raising_sample_is_named_by_the_users_own_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_raising.py").write_text(
        "class Data:\n"
        "    def __len__(self): return 40\n"
        "    def __getitem__(self, i):\n"
        "        if i == 13: raise ValueError('odd')\n"
        "        return float(i), i\n"
    )
    source = open_source(DataSection(source="my_raising:Data", validation="0.1"), 0)
    loader = Loader(source.train, batch=4, micro_batch=4, seed=0)
    with pytest.raises(UserError, match="sample 13 "):
        list(loader)
    held = {source.validation[i][1] for i in range(len(source.validation))}
    told = loader._fetcher.own_ids(0, 36)
    assert held.isdisjoint(told)
    assert held | set(told) == set(range(40)), "every number is one of the user's"


def test_libraries_of_a_users_module_are_imported_for_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that it imports before it does anything else; the module itself is not imported."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_models").mkdir()
    (tmp_path / "own_models" / "__init__.py").write_text("raise RuntimeError('not here')")
    (tmp_path / "own_models" / "net.py").write_text(
        '"""A model."""\nfrom __future__ import annotations\nimport os, scipy.stats as stats\n'
        "from sklearn.datasets import load_digits\nfrom . import other\nimport own_library\n"
        "os.environ['PANDAS'] = '1'\nimport pandas\n"
    )
    (tmp_path / "torn.py").write_text("import sklearn\ndef net(:\n")
    plain = worker_imports(ModelSection())
    found = worker_imports(ModelSection(build="own_models.net:net", loss="own_models.net:loss"))
    assert found == (*plain, "scipy.stats", "sklearn.datasets")
    for build in ("torn:net", "nowhere.at:all", "own_models:net"):
        assert worker_imports(ModelSection(build=build)) == plain
