"""Opens data, orders it by one integer, and hands it out step by step, whatever the layout.

    from shoal.data import open_data
    data = open_data("jsonl:questions.jsonl", tokenizer="bpe:2048", sequence=512, packing="on")
    for batch in run.loader(data.train): …

opens for a loop of one's own what `data.source` names for `shoal train`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it brings torch
    from shoal.data.sources import Source

OF_THE_LOADER = ("workers", "collate")
"""Keys of [data] that say how samples are fetched, not which."""


def open_data(source: str, *, seed: int = 0, **keys: Any) -> Source:
    """Open a source by the name that `data.source` has for it: datasets, tokenizer, vocabulary.

    source   jsonl:GLOB, hf:FOLDER, mix:0.7*SOURCE+0.3*SOURCE, … (docs/data.md)
    seed     of what is drawn: random tokens
    keys     further keys of [data], with its values and defaults: tokenizer, sequence, packing,
             validation, field, image_size
    Gives    `train` and `validation` (None: nothing held out) for `run.loader` and `run.evaluate`,
             `vocabulary`, `tokenizer`, `description`; every process calls it, and what is slow to
             make is made by one and cached
    Errors   ConfigError for a key or a value that means nothing, and as `shoal train` has them
    """
    import msgspec

    from shoal.base.errors import ConfigError, nearest
    from shoal.base.policies import check_value
    from shoal.config.sections import DataSection
    from shoal.config.sections import keys as keys_of
    from shoal.data.sources import open_source

    known = {key.name: key for key in keys_of(DataSection)}
    for name in keys.keys() - known.keys() | keys.keys() & set(OF_THE_LOADER):
        close = nearest(name, [key for key in known if key not in OF_THE_LOADER])
        near = f"run.loader(…, {name}=…)" if name in OF_THE_LOADER else close
        hint = f"nearest: {near}" if near else f"there are {', '.join(known)}"
        raise ConfigError(f"open_data has no argument {name}; {hint}")
    share = keys.get("validation")
    if isinstance(share, int | float) and not isinstance(share, bool):
        keys["validation"] = str(share)
    try:
        section = msgspec.convert({"source": source, **keys}, DataSection)
    except msgspec.ValidationError as error:
        raise ConfigError(f"open_data: {error}") from None
    for name in keys:
        check_value(name, known[name], getattr(section, name))
    return open_source(section, seed)
