"""Outputs of a pipeline's last stage are told whole to the others, or refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from shoal.base.errors import ConfigError
from shoal.trainer.passes.inference import _broadcast_outputs

PIPE = SimpleNamespace(
    gather_json=lambda message: [message], broadcast=lambda *_: None, device=torch.device("cpu")
)


class Answer:
    """Outputs of a class that nothing is known of."""

    def __init__(self) -> None:
        self.logits = torch.ones(2)


@pytest.mark.parametrize("outputs", [Answer(), {"logits": torch.ones(2), "more": Answer()}])
def test_an_unknown_class_is_refused(outputs: Any) -> None:
    """The other stages would get None in its place, without a word."""
    with pytest.raises(ConfigError, match="of a class that pytree cannot write; try: tensors"):
        _broadcast_outputs(outputs, cast(Any, PIPE))


def test_tensors_and_numbers_are_told() -> None:
    outputs = {"logits": torch.ones(2), "loss": None, "steps": 3}
    assert _broadcast_outputs(outputs, cast(Any, PIPE)) is outputs
