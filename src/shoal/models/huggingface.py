"""Build a transformers model, unmodified, from a local folder or a config.json: `hf:PATH`.

Class     the first of the file's `architectures`; without any, the causal language model of its
          model_type
Weights   safetensors beside the config.json; else drawn by the model's own initialisation from
          torch's default generator. Never pickles, never code from the folder, never the network
Format    fp32, whatever the checkpoint has: narrow formats are `precision.compute`'s business
Called    model(inputs) returns `.logits` [batch, seq, vocabulary], row t about the token after t,
          as `token_loss` wants them: our targets are shifted already. No keys and values are kept
          for generation (`use_cache` is off)
Source    transformers 5: PreTrainedModel, from_pretrained, modeling_utils.py
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.base.errors import ConfigError
from shoal.forecast.models.hf_presence import resolve_hf_config


def build_transformers_model(
    name: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    vocabulary: int | None = None,
    sequence: int | None = None,
) -> nn.Module:
    """Build the transformers model that `name`, hf:PATH, names, on the CPU in fp32.

    Args:
        vocabulary, sequence: of the data, which the model must cover; None if unknown.

    Raises:
        ConfigError: one line: `resolve_hf_config` refuses the config.json, this transformers lacks
        the
            model_type or the class, or the data or the weights do not fit.
    """
    path, stored = resolve_hf_config(name, arguments)
    import transformers  # an extra, and slow: only where it is asked for

    with _raise_config_errors(name, "its config.json"):
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    _check_data_fits(name, path, config, vocabulary, sequence)
    cached = getattr(config, "use_cache", False)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    kind = _find_class(name, path, config)
    if not stored or torch.empty(0).is_meta:  # shapes alone, for a plan: nothing to read
        with _raise_config_errors(name, f"{kind.__name__}(config)"):
            built: nn.Module = kind(config)
    else:
        built = _build_with_weights(name, kind, config, path.parent)
    _set_generation(name, built, path.parent, cached)
    return built


def _set_generation(name: str, model: Any, folder: Path, cached: bool) -> None:
    """Set the model's generation config from the folder's own file, else from its config.json."""
    if not model.can_generate():
        return
    if (folder / "generation_config.json").is_file():
        import transformers

        with _raise_config_errors(name, "its generation_config.json"):
            model.generation_config = transformers.GenerationConfig.from_pretrained(
                folder, local_files_only=True
            )
    else:
        model.generation_config.use_cache = cached  # it was made from a config without a cache


def _find_class(name: str, path: Path, config: Any) -> Any:
    """Return the class that the config names.

    Raises:
        ConfigError: transformers lacks it, or the config names none.
    """
    import transformers

    if not config.architectures:
        causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        if type(config) in causal:
            return causal[type(config)]
        raise ConfigError(
            f"model.name = {name}: {path} names no class, and {config.model_type} has no causal "
            f'language model; try: "architectures": ["…"] in it'
        )
    kind = getattr(transformers, config.architectures[0], None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ConfigError(
            f"model.name = {name}: architectures has {config.architectures[0]}, which is no model "
            f"of transformers {transformers.__version__}; try: model.build=pkg.mod:function"
        )
    return kind


def _check_data_fits(
    name: str, path: Path, config: Any, vocabulary: int | None, sequence: int | None
) -> None:
    """Refuse data that the model does not cover.

    Raises:
        ConfigError: the data have more token ids, or longer samples, than the model supports.
    """
    text = config.get_text_config()
    known = getattr(text, "vocab_size", None)
    if vocabulary is not None and known is not None and known < vocabulary:
        beside = path.parent / "tokenizer.json"
        nearest = str(beside) if beside.exists() else f"bpe:{known}"
        raise ConfigError(
            f"model.name = {name}: vocab_size {known} is less than the {vocabulary} of the "
            f"tokenizer; try: data.tokenizer={nearest}"
        )
    longest = getattr(text, "max_position_embeddings", None)
    if sequence is not None and longest is not None and longest < sequence:
        raise ConfigError(
            f"data.sequence = {sequence}: longer than the {longest} positions of {name}; "
            f"try: data.sequence={longest}"
        )


def _build_with_weights(name: str, kind: Any, config: Any, folder: Path) -> nn.Module:
    """Build the model with the weights in `folder`.

    Raises:
        ConfigError: weights cannot be read, have other shapes, or are incomplete.
    """
    with _raise_config_errors(name, "its weights"), _without_progress_bars():
        model: nn.Module
        model, told = kind.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    missing = sorted(told["missing_keys"])
    if missing:
        raise ConfigError(
            f"model.name = {name}: its weights lack {len(missing)} tensors of {kind.__name__}, "
            f"{missing[0]} among them; try: the class they were saved from in architectures, "
            f"or {name}/config.json for new weights"
        )
    return model


PROBE = "I've  1234 words,\n\n\tnaïve → don't (Ünï)."
"""A text that tokenizers cut in different ways."""


def describe_tokenizer_mismatch(folder: Path) -> str:
    """Return a line if `AutoTokenizer` does not read a folder's tokenizer.json as it is, else "".

    For some model types transformers takes its own class whatever the folder says. That class has
    its own rules for cutting words: other ids, and no error.

    Args:
        folder: with config.json and tokenizer.json; "" too where transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        return ""
    import transformers
    from tokenizers import Tokenizer

    wanted = Tokenizer.from_file(str(folder / "tokenizer.json"))
    try:
        found = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        same = (
            found(PROBE, add_special_tokens=False)["input_ids"]
            == wanted.encode(PROBE, add_special_tokens=False).ids
        )
        why = f"is {type(found).__name__} for this model, and cuts text otherwise"
    except Exception as failure:  # a foreign folder may raise any exception
        same, why = False, f"does not open it ({type(failure).__name__})"
    if same:
        return ""
    return (
        f"tokenizer: AutoTokenizer {why}; try: "
        f'transformers.PreTrainedTokenizerFast.from_pretrained("{folder}")'
    )


@contextmanager
def _raise_config_errors(name: str, what: str) -> Iterator[None]:
    """Turn exceptions of transformers about a user's files into a ConfigError of one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as failure:
        lines = [line for line in str(failure).splitlines() if line.strip()]
        said = lines[0].strip() if lines else type(failure).__name__
        raise ConfigError(
            f"model.name = {name}: {what} cannot be used: {said}; try: mend the file, or "
            f"model.build=pkg.mod:function"
        ) from failure


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars: the run draws its own screen."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
