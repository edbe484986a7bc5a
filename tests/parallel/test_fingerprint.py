"""A model has a name under which what was derived from it is kept: it changes with what matters."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.models.llama import Llama
from shoal.parallel import fingerprint as naming
from shoal.parallel.fingerprint import fingerprint

IDS = torch.zeros(3, 8, dtype=torch.long)


def llama(**settings: Any) -> nn.Module:
    sizes = {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 24, "sequence": 8}
    return Llama(vocabulary=33, **{**sizes, **settings})


def name_of(module: nn.Module, inputs: Any = IDS, settings: Any = ()) -> str | None:
    return fingerprint(module, lambda m: m(inputs), settings)


def test_numbers_do_not_count() -> None:
    first = name_of(llama())
    assert first is not None
    assert len(first) == 32
    assert name_of(llama(), IDS + 1) == first


def noted(*_: Any) -> None:
    """A hook."""


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.double(),
        lambda m: m.eval(),
        lambda m: setattr(m.blocks[0], "scale", 2.0),
        lambda m: m.blocks[1].register_forward_hook(noted),
        lambda m: m.blocks[0].register_buffer("mask", torch.ones(2, dtype=torch.bool)),
        lambda m: m.get_parameter("blocks.0.attention.q.weight").requires_grad_(False),
        lambda m: setattr(m.blocks[1].attention, "k", m.blocks[1].attention.v),
        lambda m: setattr(m, "loose", [nn.Linear(2, 2)]),
    ],
)
def test_what_a_derivation_may_look_at_counts(change: Any) -> None:
    module = llama()
    before = name_of(module)
    change(module)
    assert name_of(module) not in (before, None)


def test_values_of_masks_count() -> None:
    names = set()
    for value in (True, False):
        module = llama()
        module.register_buffer("mask", torch.full((2,), value))
        names.add(name_of(module))
    assert len(names) == 2


def test_the_sample_s_kind_and_settings_count() -> None:
    names = [
        name_of(llama()),
        name_of(llama(), IDS[:2]),
        name_of(llama(), (IDS, 1)),
        name_of(llama(), (IDS, 2)),
        name_of(llama(), settings=2),
    ]
    assert len(set(names)) == len(names)
    assert None not in names


def test_the_model_is_not_run() -> None:
    module = llama()
    module.forward = None
    assert name_of(module) is not None


class Opaque(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_what_cannot_be_told_apart_has_no_name() -> None:
    assert name_of(Opaque(torch.Generator())) is None
    assert fingerprint(Opaque(1), lambda m: None, ()) is None  # a run that does not call the model


def test_a_value_that_is_new_in_every_process_does_not_count() -> None:
    class Settings:
        def __init__(self, width: int) -> None:
            self.width, self._own_hash = width, hash(object())

    assert name_of(Opaque(Settings(1))) == name_of(Opaque(Settings(1)))
    assert name_of(Opaque(Settings(1))) != name_of(Opaque(Settings(2)))


LAYERS = """
import torch
import {helper}
from {helper} import scale
class Layer(torch.nn.Module):
    def forward(self, x):
        return scale(x)
"""


def test_another_source_is_another_model(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    home, helper = (tmp_path / f"{name}_{os.getpid()}.py" for name in ("own_layer", "own_help"))

    def write(layer: str, helped: str) -> str | None:
        home.write_text(LAYERS.format(helper=helper.stem) + layer)
        helper.write_text(f"def scale(x):\n    return x * {helped}\n")
        for path in (helper, home):
            sys.modules.pop(path.stem, None)
        importlib.invalidate_caches()
        return name_of(importlib.import_module(home.stem).Layer())

    first = write("", "1")
    assert write("", "1") == first is not None
    assert write("# another line\n", "1") != first
    assert write("", "2") != first  # the file that the layer's file uses


def test_another_derivation_is_another_name(monkeypatch: Any) -> None:
    first = name_of(llama())
    monkeypatch.setattr(naming, "_text_of", lambda paths: "edited")
    assert name_of(llama()) != first
