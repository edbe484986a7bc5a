"""Files in `hub/` of a run folder that let transformers open a checkpoint of the run.

A save of a module that is itself a `PreTrainedModel` writes its configuration there. `shoal train`
on text writes its tokenizer; the user's own loop the tokenizer that it passed to `parallelize`. On
a full disk the run continues without them. Nothing here imports transformers: if the user's code
did not import it, no model is one of its models.
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
from shoal.base.runlog.atomic_files import write_atomically
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
    """Return whether a module itself is a transformers model, and does not only contain one."""
    kind = pretrained_class()
    return kind is not None and isinstance(module, kind)


def write_hub_config(
    module: nn.Module, aliases: Mapping[str, str], folder: Path | None
) -> tuple[dict[str, Any], str]:
    """Write the configuration of a transformers model to `folder/hub`, if the module is one.

    If the user turned the key-value cache off for training only, the written file turns it on
    again.

    Args:
        aliases: further names of tied weights → the name under which they are saved.
        folder: of the run; None on processes that write nothing.

    Returns:
        The keys for the checkpoint's record, the same on every rank, and a line for the user if the
        configuration holds values that JSON lacks.
    """
    if not is_pretrained(module):
        return {}, ""
    try:
        files = _make_config_files(module)
    except (TypeError, ValueError) as failure:  # a value of the user's is no JSON
        return {}, (
            f"model: its config cannot be written ({failure}), so what `shoal checkpoint export` "
            f"writes of this run has no config.json; try: take out of model.config what is no "
            f"number, text, list or dict"
        )
    if folder is not None:
        _write(folder / HUB, files)
    return {TRANSFORMERS: {UNTOLD_TIES: list_unconfigured_ties(module, aliases)}}, ""


def _make_config_files(module: Any) -> dict[str, str]:
    """Return the configuration files of a model as texts.

    Raises:
        TypeError: a value of the configuration is no JSON.
    """
    config = copy.deepcopy(module.config)
    config.architectures = [type(module).__name__]
    files: dict[str, str] = {}
    if module.can_generate():
        files[GENERATION] = module.generation_config.to_json_string()
        if hasattr(config, "use_cache"):
            config.use_cache = module.generation_config.use_cache is not False
    files[CONFIG] = config.to_json_string()
    return files


def list_unconfigured_ties(module: Any, aliases: Mapping[str, str]) -> list[str]:
    """Return the names of tied weights that the configuration of a transformers model does not tie.

    Args:
        aliases: further names of tied weights → the name under which they are saved.
    """
    told = dict(getattr(module, "all_tied_weights_keys", None) or {})  # target → source
    return [
        second
        for second, first in aliases.items()
        if told.get(second, second) != told.get(first, first)
    ]


def write_hub_tokenizer(tokenizer: Any, spec: str, folder: Path) -> None:
    """Write a tokenizer to `folder/hub`, as `AutoTokenizer` opens it; one process calls it.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
        spec: `data.tokenizer`; transformers' own files about it may lie next to its file.
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
    """Raise ConfigError if an object is no tokenizer of tokenizers or transformers."""
    if not callable(getattr(tokenizer, "save_pretrained", None)) and not _is_tokenizers_object(
        tokenizer
    ):
        said = tokenizer if isinstance(tokenizer, str) else type(tokenizer).__name__
        raise ConfigError(
            f"tokenizer = {said}: a tokenizer of the library tokenizers, or of transformers, is "
            f"wanted; try: open_data(…).tokenizer, or AutoTokenizer.from_pretrained(…)"
        )


def _is_tokenizers_object(tokenizer: Any) -> bool:
    return all(callable(getattr(tokenizer, name, None)) for name in ("to_str", "token_to_id"))


def write_user_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the tokenizer of a user's own loop to `folder/hub`; one process calls it.

    An equal file stays as it is, so that a further save costs nothing.
    """
    if _is_tokenizers_object(tokenizer):
        path = folder / HUB / TOKENIZER
        with contextlib.suppress(OSError, ValueError):
            if path.read_text(encoding="utf-8") == tokenizer.to_str():
                return
        write_hub_tokenizer(tokenizer, "bpe:", folder)
        return
    with contextlib.suppress(OSError):
        tokenizer.save_pretrained(str(folder / HUB))


def _write(hub: Path, files: Mapping[str, str]) -> None:
    with contextlib.suppress(OSError):  # the run is worth more than these
        hub.mkdir(exist_ok=True)
        for name, text in files.items():
            write_atomically(hub / name, text)
