"""Loader of a run's configuration: defaults, then run.toml, then `section.key=value`.

Each value has its origin. Nothing is guessed silently. An unknown section or key is refused with
the nearest legal name, a value of the wrong type with the legal type. A key under another project's
name is accepted, and a notice names Shoal's. Unknown keys of [model] are arguments of the model's
builder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tomllib
import types
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from shoal.base.errors import ConfigError, nearest_word, shorten
from shoal.base.layouts.compression import check_compression
from shoal.base.layouts.layout import AXES
from shoal.base.layouts.policies import (
    check_compile,
    check_nonelementwise_optimizer,
    check_value,
)
from shoal.base.layouts.schedule_names import canonical_schedule
from shoal.base.validation_size import check_validation_samples
from shoal.config.paths import TEXTS, describe_other_file
from shoal.config.sections import Config, LayoutSection, keys

ALIASES = {
    "train_batch_size": "train.batch",
    "train_micro_batch_size_per_gpu": "train.micro_batch",
    "gradient_accumulation_steps": "train.accumulate",
    "gradient_clipping": "optimizer.clip",
    "nproc_per_node": "launch.processes",
    "learning_rate": "optimizer.lr",
    "max_steps": "train.steps",
    "seq_len": "data.sequence",
    "activation_checkpointing": "memory.recompute",
    "gradient_checkpointing": "memory.recompute",
}
"""Names that other projects use, accepted in every section but [model]."""


@dataclass
class LoadedConfig:
    """A whole configuration, with the origin of each value and notices for the user.

    `replace(section, origin, **values)` sets values in place, with their origin

    Attributes:
        origins: "section.key" → "command line", a file's path, "derived", …; a key that is not in
            it has its default.
        notices: lines for the user.
    """

    config: Config
    origins: dict[str, str] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    def replace(self, section: str, origin: str, **values: Any) -> None:
        """Set values of a section, and record their origin."""
        changed = dataclasses.replace(getattr(self.config, section), **values)
        self.config = dataclasses.replace(self.config, **{section: changed})
        for key in values:
            self.origins[f"{section}.{key}"] = origin


def load_config(path: Path | None, overrides: Iterable[str] = ()) -> LoadedConfig:
    """Load and check a run's configuration: overrides win over the file, the file over defaults.

    Args:
        path: a run.toml, or None.
        overrides: texts `section.key=value`, later ones win.

    Note:
        layout.strategy on the command line resets the degrees of the file to defaults, and another
        project's name of a key becomes Shoal's; both leave a notice.

    Raises:
        ConfigError: one line with file or "command line", key, legal values, the nearest one.
        PlanError: values that do not go together (compile, compress, optimizer, schedule).
    """
    loaded = LoadedConfig(Config())
    if path is not None:
        for section, table in _read_toml(path).items():
            if not isinstance(table, dict):
                raise ConfigError(
                    f"{path}: {section}: stands outside a section; try: "
                    f"{_guess_section(section) or '[train]'}"
                )
            for key, value in table.items():
                _set_key(loaded, section, key, value, str(path))
    for text in overrides:
        name, found, value_text = text.partition("=")
        section, dot, key = name.strip().partition(".")
        if not found or not dot:
            raise ConfigError(
                f"command line: {shorten(text)}: overrides are written section.key=value"
                + (f"; try: {_guess_section(name)}={value_text}" if _guess_section(name) else "")
            )
        _set_key(loaded, section, key, _parse_value(value_text), "command line")
    _apply_strategy_override(loaded)
    _apply_length_override(loaded)
    _apply_model_tokenizer(loaded)
    if loaded.config.data.packing == "on":  # packed rows pass their positions by name
        loaded.replace("model", "of data.packing", call="kwargs")
    _check_values(loaded.config)
    return loaded


def _apply_length_override(loaded: LoadedConfig) -> None:
    """Reset the file's train.epochs if the command line has train.steps, or the reverse."""
    for key, other in (("steps", "epochs"), ("epochs", "steps")):
        said = loaded.origins.get(f"train.{key}") == "command line"
        held = loaded.origins.get(f"train.{other}", "command line") != "command line"
        value, replaced = (getattr(loaded.config.train, name) for name in (key, other))
        if said and held and value and replaced:
            loaded.replace("train", "default", **{other: 0})
            loaded.notices.append(
                f"train.{key} = {value}: takes the place of train.{other} = {replaced} in the file"
            )


def _apply_model_tokenizer(loaded: LoadedConfig) -> None:
    """Set data.tokenizer to that of a pretrained `hf:FOLDER`, whose weights know no other ids.

    A tokenizer that the user gives stays; a notice names one that is trained anew.
    """
    config = loaded.config
    if not config.model.name.startswith("hf:"):
        return
    from shoal.base.pretrained_folders import TOKENIZER, pretrained_folder

    source = config.data.source.partition(":")[0]
    folder = pretrained_folder(config.model.name)
    if config.model.build or folder is None or source not in (*TEXTS, "mix"):
        return
    path, spec = folder / TOKENIZER, config.data.tokenizer
    if "data.tokenizer" not in loaded.origins and path.is_file():
        loaded.replace("data", "of model.name", tokenizer=str(path))
        loaded.notices.append(f"data.tokenizer = {path}: the one of the weights in {folder}")
    elif spec.startswith("bpe:"):
        nearest = str(path) if path.is_file() else "the tokenizer.json of that model"
        loaded.notices.append(
            f"data.tokenizer = {spec}: is trained on this text, and the weights in {folder} know "
            f"other ids; try: data.tokenizer={nearest}"
        )


SHAPES = (*(axis for axis in AXES[1:]), "ep", "zero", "threads", "schedule", "chunks")
"""Keys of [layout] that a strategy's name sets too."""


def _apply_strategy_override(loaded: LoadedConfig) -> None:
    """Reset the file's degrees if the command line names a strategy."""
    if loaded.origins.get("layout.strategy") != "command line":
        return
    plain = LayoutSection()
    said = [
        key
        for key in SHAPES
        if loaded.origins.get(f"layout.{key}", "command line") != "command line"
        and getattr(loaded.config.layout, key) != getattr(plain, key)
    ]
    if said:
        loaded.replace("layout", "default", **{key: getattr(plain, key) for key in said})
        names = ", ".join(f"layout.{key}" for key in said)
        loaded.notices.append(
            f"layout.strategy = {loaded.config.layout.strategy}: takes the place of {names} in the "
            f"file"
        )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        other = describe_other_file(path)
        word = path.suffix != ".toml" and len(path.parts) == 1  # as in `shoal plan llama`
        if word and path.suffix and path.stem in {f.name for f in fields(Config)} and not other:
            raise ConfigError(f"{path}: has no value; try: {path}=…") from None
        if other:
            raise ConfigError(f"{path}: no such file") from None
        hint = (
            f"a model is named by model.name={path}" if word else "without one the defaults count"
        )
        if len(path.parts) == 2 and path.suffix != ".toml" and not path.parent.exists():
            hint = "a model of Hugging Face is a folder here: model.name=hf:FOLDER"
        raise ConfigError(f"{path}: no such file; {hint}") from None
    except IsADirectoryError:
        hint = f"; to go on with a run: shoal train --resume {path}"
        raise ConfigError(f"{path}: is a folder, a run.toml is wanted{hint}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as failure:
        hint = describe_other_file(path) or f"is not TOML: {failure}"
        raise ConfigError(f"{path}: {hint}") from None
    except OSError as failure:
        raise ConfigError(f"{path}: cannot be read: {failure.strerror}") from None


def _parse_value(text: str) -> Any:
    """Return a value from the command line: TOML if it parses as TOML, else the text itself.

    >>> (
    ...     _parse_value("3"),
    ...     _parse_value("1e-3"),
    ...     _parse_value("true"),
    ...     _parse_value("adamw"),
    ...     _parse_value("[0.9, 0.99]"),
    ... )
    (3, 0.001, True, 'adamw', [0.9, 0.99])
    """
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _set_key(loaded: LoadedConfig, section: str, key: str, value: Any, origin: str) -> None:
    sections = {f.name for f in fields(Config)}
    # In [model] the same word may be an argument of the user's own builder.
    canonical = ALIASES.get(key) if section != "model" else None
    if canonical is not None:
        loaded.notices.append(f"{origin}: {section}.{key} is called {canonical} here")
        section, key = canonical.split(".")
    if section not in sections:
        close = nearest_word(section, sections) or _section_of(key)
        hint = f"; try: {close}.{key}" if close else f"; sections: {', '.join(sorted(sections))}"
        raise ConfigError(f"{origin}: {shorten(f'{section}.{key}')}: no such section{hint}")
    if (section, key) == ("islands", "period") and (
        found := re.fullmatch(r" *(\d+) ?epochs? *", str(value))
    ):
        key, value = "epochs", int(found[1])
    current = getattr(loaded.config, section)
    hints = _key_types(section)
    if section == "model" and key not in hints:
        loaded.replace("model", origin, arguments={**current.arguments, key: value})
        loaded.origins[f"model.{key}"] = origin
        return
    if key not in hints or key == "arguments":
        raise ConfigError(
            f"{origin}: {shorten(f'{section}.{key}')}: no such key{_nearest_key(section, key)}"
        )
    if hints[key] is str and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if hints[key] == tuple[str, ...] and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if hints[key] == tuple[float, float] and isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = [float(part) for part in value.split(",")]
    try:
        typed = msgspec.convert(value, type=hints[key], strict=True)
    except msgspec.ValidationError:
        raise ConfigError(
            f"{origin}: {section}.{key} = {shorten(repr(value))}: {_type_text(hints[key])} is "
            f"wanted, got {_type_text(type(value))}"
        ) from None
    for text in typed if isinstance(typed, tuple) else (typed,):
        if isinstance(text, str) and any(ord(letter) < ord(" ") for letter in text):
            raise ConfigError(
                f"{origin}: {section}.{key} = {shorten(repr(text))}: holds a line break or another "
                f"control character; try: {shorten(repr(' '.join(text.split())))}"
            )
    loaded.replace(section, origin, **{key: typed})


@cache
def _key_types(section: str) -> dict[str, Any]:
    """Return the type of every key of a section; cached, as a run.toml has a hundred keys."""
    return get_type_hints(type(getattr(Config(), section)))


def _nearest_key(section: str, key: str) -> str:
    everywhere = {f"{f.name}.{k}" for f in fields(Config) for k in _keys(f.name)}
    # Names of other projects are understood, so a slip in one of them means ours.
    others = {name: ours for name, ours in ALIASES.items() if ours.startswith(f"{section}.")}
    if elsewhere := _section_of(key):  # the very name, in another section
        return f"; try: {elsewhere}.{key}"
    here = nearest_word(key, [*_keys(section), *others])
    if here:
        return f"; try: {others.get(here) or f'{section}.{here}'}"
    close = nearest_word(f"{section}.{key}", everywhere)
    return f"; try: {close}" if close else f"; keys: {', '.join(sorted(_keys(section)))}"


def _keys(section: str) -> list[str]:
    return [key.name for key in keys(getattr(Config(), section))]


def _section_of(key: str) -> str | None:
    owners = [f.name for f in fields(Config) if key in _keys(f.name)]
    return owners[0] if owners else None


def _guess_section(name: str) -> str | None:
    key = name.rpartition(".")[2].strip()
    section = _section_of(key)
    return f"{section}.{key}" if section else None


def _type_text(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text",
             list: "a list", dict: "a table", types.NoneType: "nothing"}  # fmt: skip
    if kind in names:
        return names[kind]
    text = str(kind)
    return "a list of two numbers" if "float, float" in text else "a list of texts"


def _check_values(config: Config) -> None:
    """Check the values for rules that a type cannot express."""
    precision, optimizer = config.precision, config.optimizer
    for section in fields(Config):
        values = getattr(config, section.name)
        for key in keys(values):
            check_value(f"{section.name}.{key.name}", key, getattr(values, key.name))
    check_validation_samples(config.train.validate_samples)
    precision.check_residual("precision.residual", "precision.compute", "bf16")
    precision.check_loss_scale("precision.loss_scale", "precision.compute", "fp16")
    config.islands.resolved()
    layout = config.layout
    check_compile(config.train.compile, config.memory.recompute)
    check_nonelementwise_optimizer(optimizer.name, layout.named(), layout.tp, layout.ep)
    check_compression(layout.compress, layout.named(), precision.compute, precision.reduce)
    if layout.schedule:
        canonical_schedule(layout.schedule)
    layout.check_split()
    if layout.zero not in range(-1, 4):
        raise ConfigError(
            f"layout.zero = {layout.zero}: a stage is 0, 1, 2 or 3; try: "
            f"layout.zero={3 if layout.zero > 3 else 0}"
        )
    if config.train.steps and config.train.epochs:
        raise ConfigError(
            f"train.steps = {config.train.steps} and train.epochs = {config.train.epochs}: one of "
            f"them decides the length; try: train.steps={config.train.steps}"
        )
