"""Check that a model separates the documents of a packed row, by running it before training.

A model that takes `position_ids` may still let documents see each other (a convolution, a state
that runs along the row, a mask made without them). So the check runs rows of two short documents.
The second document must have the same logits as alone, and must not depend on the first document.
"""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import torch
from torch import nn

from shoal.base.errors import ConfigError
from shoal.data.loading.sample_seeds import preserved_rng
from shoal.models.loss import find_logits

TOKENS = 16
"""Largest number of tokens of each of the two documents."""

ROUNDING = 1e-4
"""Share of the largest logit by which rows of different lengths may differ in fp32."""

SEEN = 1e-5
"""The same limit where only tokens of the other document differ; experts may regroup the others."""


def check_packing(model: nn.Module, name: str, sequence: int) -> None:
    """Raise ConfigError for a model that mixes the documents of a packed row of `sequence` tokens.

    Checked: `forward` takes input_ids and position_ids; on the CPU, the logits of small rows.

    Raises:
        ConfigError: the model mixes documents, or cannot run a packed row.
    """
    taken = inspect.signature(model.forward).parameters
    by_name = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values())
    missing = [key for key in ("input_ids", "position_ids") if key not in taken and not by_name]
    if missing:
        _refuse(model, name, f"its forward takes no {' and no '.join(missing)}")
    if any(p.device.type != "cpu" for p in model.parameters()):  # shapes alone, for a plan
        return
    tokens = max(1, min(TOKENS, sequence // 2))
    first, second = torch.arange(2 * tokens).remainder(7).view(2, 1, tokens)
    other = first.add(1).remainder(7)
    alone = _run_documents(model, name, second)
    after = [_run_documents(model, name, one, second)[:, tokens:] for one in (first, other)]
    largest = float(alone.abs().max())
    if float((after[0] - after[1]).abs().max()) > SEEN * largest:
        _refuse(model, name, "tokens of one document change what another one gives")
    if float((after[0] - alone).abs().max()) > ROUNDING * largest:
        _refuse(model, name, "a document gives other values behind another one than alone")


def _run_documents(model: nn.Module, name: str, *documents: torch.Tensor) -> torch.Tensor:
    """Return logits [1, tokens, vocabulary] of one row of documents, in eval mode."""
    training = model.training
    ids = torch.cat(documents, 1)
    places = torch.arange(documents[0].shape[1]).repeat(len(documents))[None]
    given: dict[str, Any] = {"input_ids": ids, "position_ids": places}
    try:
        with torch.no_grad(), preserved_rng():
            return find_logits(model.eval()(**given)).double()
    except ConfigError:
        raise
    except Exception as error:
        _refuse(model, name, f"it fails on one ({type(error).__name__}: {error})", error)
    finally:
        model.train(training)


def _refuse(model: nn.Module, name: str, why: str, error: Exception | None = None) -> NoReturn:
    raise ConfigError(
        f"data.packing = on: {name} ({type(model).__name__}) cannot keep documents of a packed row "
        f"apart: {why}; try: data.packing=off"
    ) from error
