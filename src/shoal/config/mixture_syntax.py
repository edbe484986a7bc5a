"""Syntax of mixtures of data sources, `mix:0.7*SOURCE+0.3*SOURCE`.

Weights are positive decimals; only their ratio counts, so 7 and 3 mean the same as 0.7 and 0.3.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from shoal.base.errors import ConfigError

MOST_TURNS = 100_000
"""Most samples until a mixture's order of sources repeats: five digits of a weight."""

NEXT = re.compile(r"\+(?=\s*[0-9.]+\s*\*)")
"""The + between two parts; one within a path is followed by no weight."""

BEGINS = re.compile(
    r"(?:^|\+)\s*(?:([^+*:]*)\*|([0-9.]+))?\s*((?:text|jsonl|parquet|hf|tokens|images|wds):"
    r"|(?:stdlib|digits|synthetic)\s*(?=\+|$))"
)
"""Start of a part by its source's name, after a weight and *, a number alone, or nothing."""

WEIGHT = re.compile(r"\s*[0-9]*\.?[0-9]+\s*")

PART = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*\*\s*(\S.*?)\s*")


def split_mixture(argument: str, where: str) -> list[tuple[int, str]]:
    """Split the text after `mix:` into (samples in each round, source), in least terms.

    Raises:
        ConfigError: a part has no weight, or an invalid one; one part alone, a weight of 0, more
            digits than a round of 100,000 samples can represent, or a mixture of mixtures.

    >>> split_mixture("0.7*text:a+b/*.txt+0.3*stdlib", "data.source")
    [(7, 'text:a+b/*.txt'), (3, 'stdlib')]
    """
    line = f"{where} = mix:{argument}"
    _check_weights(argument, line)
    parts = []
    for text in NEXT.split(argument):
        found = PART.fullmatch(text)
        if found is None:
            raise ConfigError(f"{line}: {text} has no weight; write mix:0.7*SOURCE+0.3*SOURCE")
        weight, source = Fraction(found[1]), found[2]
        if not weight:
            raise ConfigError(f"{line}: a weight of 0 takes nothing; try: leave {source} out")
        if source.startswith("mix:"):
            raise ConfigError(f"{line}: mixtures do not nest; try: one mix: of all sources")
        parts.append((weight, source))
    if len(parts) < 2:
        raise ConfigError(f"{line}: mixes one source; try: {where}={parts[0][1]}")
    total = sum(weight for weight, _ in parts)
    shares = [weight / total for weight, _ in parts]
    turns = math.lcm(*(share.denominator for share in shares))
    if turns > MOST_TURNS:
        named = zip(shares, parts, strict=True)
        near = "+".join(f"{max(float(s), 0.001):.3f}*{source}" for s, (_, source) in named)
        raise ConfigError(
            f"{line}: weights of this ratio take {turns} samples to be kept exactly, and at most "
            f"{MOST_TURNS} are counted; try: mix:{near}"
        )
    return [(int(s * turns), source) for s, (_, source) in zip(shares, parts, strict=True)]


def _check_weights(argument: str, line: str) -> None:
    """Raise ConfigError for a source after text that is no weight, which would parse as a path."""
    begins = list(BEGINS.finditer(argument))
    ends = [*(found.start() for found in begins[1:]), len(argument)]
    for found, end in zip(begins, ends, strict=False):
        weight, number, _ = found.groups()
        source = argument[found.start(3) : end].strip()
        if weight is None and number is None:
            raise ConfigError(f"{line}: {source} has no weight; write mix:0.7*SOURCE+0.3*SOURCE")
        if number is not None:
            raise ConfigError(
                f"{line}: {number}{source} has no * after its weight; try: {number}*{source}"
            )
        if not WEIGHT.fullmatch(weight):
            raise ConfigError(
                f"{line}: {weight.strip() or 'nothing'} is no weight of {source}, a number above 0 "
                f"is; try: 0.5*{source}"
            )
