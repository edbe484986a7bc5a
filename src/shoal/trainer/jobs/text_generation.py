"""Text generation from the newest checkpoint of a run on text, on one process.

The weights are the optimizer's own, in their format, whatever layout saved them; tensor by tensor
they are copied into a freshly built model. A transformers model is built from the configuration in
the run folder, so its origin need not exist any more, and generates with transformers' own
`generate`. Every other model runs again for each token. A user's own loop writes no run.toml, so
only a transformers model can be rebuilt from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.base.errors import CheckpointError, ConfigError
from shoal.base.pretrained_folders import HF
from shoal.checkpoint.export.export_file import select_tensors
from shoal.checkpoint.format.hub_folder import ADAPTER_CONFIG, CONFIG, HUB, TOKENIZER
from shoal.config.load import load_config
from shoal.config.paths import TEXTS, add_working_folder, split_source
from shoal.config.sections import Config, DataSection
from shoal.data.text.chat_examples import find_template, load_template, plain_question
from shoal.data.text.text_files import END_OF_TEXT
from shoal.fabric.device import accelerator_type
from shoal.forecast.models.hf_presence import is_hf_name
from shoal.models.catalog import build
from shoal.models.generate import generate
from shoal.trainer.jobs.configured_run import call_builder
from shoal.trainer.run_folder.hub_files import is_pretrained
from shoal.wire.phases import iter_with_progress, phase


def generate_text(
    folder: Path,
    checkpoint: Path,
    prompt: str,
    *,
    tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    chat: bool = False,
    average: bool = False,
) -> str:
    """Return a prompt and the text that the model of a checkpoint generates after it.

    Args:
        folder: of the run, with its hub/ and mostly a run.toml.
        checkpoint: a step's folder.
        prompt: the text to continue.
        tokens: new tokens; fewer if transformers' `generate` meets the model's own end.
        temperature: divides the logits; 0 takes the likeliest token.
        seed: of the draws: the same text again on the same device.
        chat: the prompt is a user's turn, in the template of the run's data
            (data/text/chat_examples.py); the result is the answer alone, up to the end of text.
        average: load the averaged weights in place of the optimizer's.

    Raises:
        ConfigError: a run that is not on text or has no tokenizer, or a prompt without tokens.
        CheckpointError: a checkpoint of another model than run.toml describes, or without the
            average.
    """
    config = read_text_config(folder)
    tokenizer = read_tokenizer(folder, is_own=config is None)
    prompt = _format_question(folder, prompt) if chat and prompt else prompt
    # As the run's own text was encoded: without special tokens.
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not ids:
        raise ConfigError("--prompt: is empty, and there is nothing to go on from; try: 'The'")
    device = torch.device(accelerator_type() or "cpu")
    model: Any = make_saved_model(config, folder, tokenizer.get_vocab_size())
    load_weights(model, checkpoint, average)
    model.to(device).eval()
    begun = torch.tensor([ids], device=device)
    longest = context_length(model, config)
    if is_pretrained(model) and model.can_generate() and len(ids) + tokens <= longest:
        written = _generate_with_transformers(model, begun, tokens, temperature, seed)
    else:
        written = begun
        generator = torch.Generator(device=device).manual_seed(seed)
        for _ in iter_with_progress("sample", tokens, range(tokens)):
            written = generate(model, written, 1, temperature, generator, window=longest)
    found = written[0].tolist()
    if chat:
        end, found = tokenizer.token_to_id(END_OF_TEXT), found[len(ids) :]
        found = found[: found.index(end)] if end in found else found
    text: str = tokenizer.decode(found)
    return text.strip() if chat else text


def _format_question(folder: Path, prompt: str) -> str:
    """Return the text that asks for an answer to a user's turn."""
    template = find_template(str(folder / HUB / TOKENIZER))
    if not template:
        return plain_question(prompt)
    return load_template(template)([{"role": "user", "content": prompt}], True)


def read_text_config(folder: Path) -> Config | None:
    """Read the configuration of a run on text; return None for a user's own loop.

    Raises:
        ConfigError: the run is not on text, or has no run.toml.
    """
    if not (folder / "run.toml").is_file():
        hub = folder / HUB
        if (hub / CONFIG).is_file() and not (hub / ADAPTER_CONFIG).is_file():
            return None
        raise ConfigError(
            f"{folder}: has no run.toml, so it is no run of `shoal train`, and nothing here builds "
            f"its model; try: shoal checkpoint export {folder} {folder.name}-exported"
        )
    config = load_config(folder / "run.toml").config
    kind = split_source(config.data.source)[0]
    if kind == "tokens":
        raise ConfigError(
            f"{folder}: trained on {config.data.source}, tokens whose tokenizer is not known here; "
            f"try: shoal checkpoint export {folder} {folder.name}-exported"
        )
    if kind not in (*TEXTS, "mix"):
        raise ConfigError(
            f"{folder}: trained on {config.data.source}, which is not text; `shoal sample` is for "
            f"data.source=stdlib, text:GLOB, jsonl:GLOB, parquet:GLOB and hf:FOLDER"
        )
    return config


def read_tokenizer(folder: Path, *, is_own: bool) -> Any:
    """Return the tokenizer that the run stores; `is_own`: of a user's own loop.

    Raises:
        ConfigError: the run folder has no tokenizer that can be read.
    """
    path = folder / HUB / TOKENIZER
    if not path.is_file() and is_own:
        raise ConfigError(
            f"{folder}: keeps no {HUB}/{TOKENIZER}; try: shoal.parallelize(…, tokenizer=…), or "
            f"tokenizer.save_pretrained({str(folder / HUB)!r})"
        )
    if not path.is_file():
        raise ConfigError(
            f"{folder}: keeps no {HUB}/{TOKENIZER}, as runs of an earlier Shoal; it is written by "
            f"`shoal train --resume {folder}`"
        )
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise ConfigError(f"{path}: is no tokenizer: {error}") from error


@phase("build")
def make_saved_model(config: Config | None, folder: Path, vocabulary: int) -> nn.Module:
    """Build the run's model, with any weights."""
    if config is None:
        return build(f"{HF}{folder / HUB / CONFIG}", {})
    section = config.model
    add_working_folder()
    if section.build:
        return call_builder(section.build, section.arguments)
    name = section.name
    if is_hf_name(name) and (folder / HUB / CONFIG).is_file():
        name = f"{HF}{folder / HUB / CONFIG}"
    model = build(name, section.arguments, vocabulary=vocabulary, sequence=config.data.sequence)
    if config.tune.adapter == "none":
        return model
    from shoal.trainer.adapters import add_adapters

    return add_adapters(model, config.tune, name.removeprefix("hf:"))


@torch.no_grad()
def load_weights(model: nn.Module, checkpoint: Path, average: bool) -> None:
    """Copy a checkpoint's weights into a model.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    found = select_tensors(checkpoint, average=average)
    here = model.state_dict(keep_vars=True)
    unlike = sorted((found.names.keys() | found.aliases.keys()) ^ here.keys())
    shapes = {name: tuple(tensor.shape) for name, tensor in here.items()}
    unlike += [e.key for e in found.entries if shapes.get(e.key, e.shape) != tuple(e.shape)]
    if unlike:
        raise CheckpointError(
            f"{checkpoint}: {unlike[0]} is not as in the model that run.toml describes; compare "
            f"[model] with that of the run that saved it"
        )
    for short in iter_with_progress("read", len(found.names), found.names):
        here[short].copy_(found.read_tensor(short))


def context_length(model: nn.Module, config: Config | None) -> int:
    """Return the context length of the model in tokens."""
    if is_pretrained(model):
        told: Any = model.config
        found = getattr(told.get_text_config(), "max_position_embeddings", None)
    else:
        found = getattr(model, "sequence", None)
    usual = DataSection() if config is None else config.data
    return found if isinstance(found, int) else usual.sequence


@phase("sample")
def _generate_with_transformers(
    model: Any, begun: torch.Tensor, tokens: int, temperature: float, seed: int
) -> torch.Tensor:
    torch.manual_seed(seed)
    drawn = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    ends = model.generation_config.eos_token_id
    first_end = ends[0] if isinstance(ends, list) else ends
    found: torch.Tensor = model.generate(
        begun,
        attention_mask=torch.ones_like(begun),
        max_new_tokens=tokens,
        pad_token_id=first_end or 0,  # of one text nothing is padded; without it a warning comes
        use_cache=True,
        **drawn,
    )
    return found
