"""Keeps in a run's folder what a checkpoint needs besides to be opened by transformers: `hub/`.

A save of a module that is a `PreTrainedModel` itself leaves its configuration there, `shoal train`
on text its tokenizer, a loop of one's own the one that it gave to `parallelize`. On a full disk the
run goes on without. Nothing here imports transformers: where nobody did, no model is one of its.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from shoal.base.errors import ConfigError
from shoal.base.runlog.atomic_files import write_whole
from shoal.checkpoint.format.hub_folder import (
    BESIDE_TOKENIZER,
    CONFIG,
    GENERATION,
    HUB,
    TOKENIZER,
    TRANSFORMERS,
    UNTOLD_TIES,
)
from shoal.parallel.build.pretrained import pretrained_class


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module is a model of transformers, not one that has such a model inside."""
    kind = pretrained_class()
    return kind is not None and isinstance(module, kind)


def keep_config(
    module: nn.Module, aliases: Mapping[str, str], folder: Path | None
) -> tuple[dict[str, Any], str]:
    """Write the configuration of a model of transformers to `folder/hub`, if it is one.

    A cache of keys and values that is off for training alone is on again in what is written.

    Args:
        aliases: further names of tied weights → the name they are kept under.
        folder: of the run; None on processes that write nothing.

    Returns:
        what the checkpoint's record says of it, the same on every rank, and a line for the user
        where the configuration holds what is no JSON.
    """
    if not is_pretrained(module):
        return {}, ""
    try:
        files = _configs(module)
    except (TypeError, ValueError) as failure:  # whatever a user put into it
        return {}, (
            f"model: its config cannot be written ({failure}), so what `shoal checkpoint export` "
            f"writes of this run has no config.json; try: take out of model.config what is no "
            f"number, text, list or dict"
        )
    if folder is not None:
        _write(folder / HUB, files)
    return {TRANSFORMERS: {UNTOLD_TIES: untold_ties(module, aliases)}}, ""


def _configs(module: Any) -> dict[str, str]:
    """The files of a model's configuration, as texts. Errors: TypeError for what is no JSON."""
    config = copy.deepcopy(module.config)
    config.architectures = [type(module).__name__]
    files: dict[str, str] = {}
    if module.can_generate():
        files[GENERATION] = module.generation_config.to_json_string()
        if hasattr(config, "use_cache"):
            config.use_cache = module.generation_config.use_cache is not False
    files[CONFIG] = config.to_json_string()
    return files


def untold_ties(module: Any, aliases: Mapping[str, str]) -> list[str]:
    """Names of tied weights of a model of transformers that its own configuration does not tie.

    Args:
        aliases: further names of tied weights → the name they are kept under.
    """
    told = dict(getattr(module, "all_tied_weights_keys", None) or {})  # target → source
    return [
        second
        for second, first in aliases.items()
        if told.get(second, second) != told.get(first, first)
    ]


def keep_tokenizer(tokenizer: Any, spec: str, folder: Path) -> None:
    """Write a tokenizer to `folder/hub`, as `AutoTokenizer` opens it; one process calls it.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
        spec: `data.tokenizer`, beside whose file the words of transformers about it may lie.
    """
    from shoal.data.text.text_files import END_NAMES

    ends = [name for name in END_NAMES if tokenizer.token_to_id(name) is not None]
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # which reads tokenizer.json as it stands
        "clean_up_tokenization_spaces": False,
        **({"eos_token": ends[0]} if ends else {}),
    }
    words = json.dumps(told, indent=2) + "\n"
    _write(folder / HUB, {TOKENIZER: tokenizer.to_str(), "tokenizer_config.json": words})
    if spec.startswith("bpe:"):
        return
    with contextlib.suppress(OSError):
        for name in BESIDE_TOKENIZER:
            beside = Path(spec).expanduser().with_name(name)
            if beside.is_file():
                shutil.copyfile(beside, folder / HUB / name)


def check_tokenizer(tokenizer: Any) -> None:
    """Errors: ConfigError for what is no tokenizer of `tokenizers` or transformers."""
    if not callable(getattr(tokenizer, "save_pretrained", None)) and not _is_plain(tokenizer):
        said = tokenizer if isinstance(tokenizer, str) else type(tokenizer).__name__
        raise ConfigError(
            f"tokenizer = {said}: a tokenizer of the library tokenizers, or of transformers, is "
            f"wanted; try: open_data(…).tokenizer, or AutoTokenizer.from_pretrained(…)"
        )


def _is_plain(tokenizer: Any) -> bool:
    return all(callable(getattr(tokenizer, name, None)) for name in ("to_str", "token_to_id"))


def keep_given(tokenizer: Any, folder: Path) -> None:
    """Write the tokenizer of a loop of one's own to `folder/hub`; one process calls it.

    A file that is there already is left alone where it is the same: a save costs no more then.
    """
    if _is_plain(tokenizer):
        path = folder / HUB / TOKENIZER
        with contextlib.suppress(OSError, ValueError):
            if path.read_text(encoding="utf-8") == tokenizer.to_str():
                return
        keep_tokenizer(tokenizer, "bpe:", folder)
        return
    with contextlib.suppress(OSError):
        tokenizer.save_pretrained(str(folder / HUB))


def _write(hub: Path, files: Mapping[str, str]) -> None:
    with contextlib.suppress(OSError):  # the run is worth more than these
        hub.mkdir(exist_ok=True)
        for name, text in files.items():
            write_whole(hub / name, text)
