"""The reasons for which a composition is rightly refused, each with a check that it is true of it.

A refusal counts only if its whole line is one of these texts and what the text says follows from
the words of the command. Each was read beside the code that raises it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from compositions_drawn import Words, data_ranks, degrees

BLOCKS = 4
"""Of every model that is drawn."""

WHOLE_MATRICES = ("muon", "lamb")
"""Optimizers that take the norm of a whole matrix, so a part of one cannot be stepped alone."""

HALVES = ("zero-bubble", "zbv", "dualpipe")
"""Schedules whose backward runs in two halves."""


@dataclass(frozen=True)
class Reason:
    """One reason: the line's pattern up to "; try", and whether it is true of the words."""

    name: str
    line: str
    is_true: Callable[[Words, re.Match[str]], bool]


def reason_of(line: str, words: Words) -> tuple[str, bool]:
    """(name of the reason that a refusal gives, whether it is true); ("", False) if none is it."""
    for reason in REASONS:
        if found := re.match(reason.line + r"; (?:nearest(?: legal)?|try): ", line):
            return reason.name, reason.is_true(words, found)
    return "", False


def zero_of(words: Words) -> int:
    """What the data-parallel ranks split: 0 nothing to 3 parameters."""
    named = {"zero1": 1, "zero2": 2, "fsdp": 3, "hsdp": 3}
    return named.get(words.get("layout.strategy", ""), int(words.get("layout.zero", "0")))


def stages(words: Words) -> int:
    """Pieces into which the schedule cuts the model."""
    schedule, pp = words.get("layout.schedule", ""), degrees(words)["pp"]
    each = {"zbv": 2, "interleaved": int(words.get("layout.chunks", "2"))}.get(schedule, 1)
    return pp * each


def micro_batches(words: Words) -> int:
    """Micro-batches per step and data-parallel rank."""
    return int(words["train.batch"]) // data_ranks(words) // int(words["train.micro_batch"])


def _cannot_fill(words: Words) -> bool:
    """Whether a schedule that takes micro-batches in groups got another number."""
    count, pp = micro_batches(words), degrees(words)["pp"]
    if words["layout.schedule"] == "dualpipe":
        return count % 2 == 1 or count < 2 * pp
    return words["layout.schedule"] == "interleaved" and count % pp != 0


def _compresses(words: Words, found: re.Match[str]) -> bool:
    return words.get("layout.compress") == found[1]


OWN_SHARE = r"(?:differs from that part of a whole step by [\d.e+-]+ \(.*\)|raises \w+: .*)"
"""What trying an optimizer on parts of parameters finds."""

BY_NAME = r"optimizer\.name = \w+ [^;]*"
"""What is known of an optimizer without trying it."""

REASONS = (
    Reason(
        "attention over ranks that are not there",
        r"layout\.context = (\w+): says how attention is computed over layout\.cp, which is 1",
        lambda words, found: words.get("layout.context") == found[1] and degrees(words)["cp"] == 1,
    ),
    Reason(
        "a sequence split over ranks that are not there",
        r"layout\.sequence_parallel = on: splits the sequence over layout\.tp, which is 1",
        lambda words, _: words["layout.sequence_parallel"] == "on" and degrees(words)["tp"] == 1,
    ),
    Reason(
        "computed again for each of two halves",
        r"memory\.recompute = (\w+): layout\.schedule = ([\w-]+) runs a backward in two halves, so "
        r"a block would be computed again for every weight in it \(2\.5 times the work\)",
        lambda words, found: words.get("memory.recompute") == found[1]
        and words.get("layout.schedule") == found[2] in HALVES,
    ),
    Reason(
        "parameters freed between two halves",
        r"layout\.schedule = ([\w-]+): runs a backward in two halves, and (fsdp|hsdp) frees the "
        r"gathered parameters between them",
        lambda words, found: words["layout.schedule"] == found[1] in HALVES and zero_of(words) == 3,
    ),
    Reason(
        "more stages than blocks",
        r"layout\.pp = \d( × \d stages per rank \(layout\.schedule = [\w-]+\) = (\d+))?: more "
        rf"stages than the {BLOCKS} blocks of [\w:]+",
        lambda words, found: stages(words) == int(found[2] or 0) > BLOCKS,
    ),
    Reason(
        "a schedule's number of micro-batches",
        r"layout\.schedule = (dualpipe|interleaved): needs .* per step.*, got (\d+) per "
        r"data-parallel rank \(train\.batch \d+, train\.micro_batch \d+\)",
        lambda words, found: words["layout.schedule"] == found[1]
        and micro_batches(words) == int(found[2])
        and _cannot_fill(words),
    ),
    Reason(
        "batches that do not divide",
        r"train\.batch = (\d+): not divisible by train\.micro_batch \d+ × \d data-parallel ranks "
        r"= (\d+)",
        lambda words, found: words["train.batch"] == found[1]
        and data_ranks(words) * int(words["train.micro_batch"]) == int(found[2])
        and int(found[1]) % int(found[2]) != 0,
    ),
    Reason(
        "fully_shard does not encode",
        r"layout\.compress = (\S+): hsdp sums its parts over replicas inside fully_shard, which "
        r"cannot encode",
        lambda words, found: _compresses(words, found) and zero_of(words) == 3,
    ),
    Reason(
        "gradients that end inside a matrix",
        r"layout\.compress = ((?:powersgd|topk):\S+): (zero\d|fsdp) cuts gradients where no matrix "
        r"ends and gives each rank its part only, which codes number by number carry",
        lambda words, found: _compresses(words, found)
        and zero_of(words) == (3 if found[2] == "fsdp" else int(found[2][-1])),
    ),
    Reason(
        "what is left out changes its scale",
        r"layout\.compress = (\S+): fp16's loss scale changes between steps, and what one step "
        r"leaves out would be added in the next in another scale",
        lambda words, found: _compresses(words, found) and words["precision.compute"] == "fp16",
    ),
    Reason(
        "rounding what must be seen whole",
        r"layout\.compress = (\S+): precision\.reduce = bf16 would round what error feedback must "
        r"see whole",
        lambda words, found: _compresses(words, found) and words.get("precision.reduce") == "bf16",
    ),
    Reason(
        "experts are summed over some ranks only",
        r"layout\.compress = (\S+): sums over all data-parallel ranks, and layout\.ep = (\d) sums "
        r"experts over some",
        lambda words, found: _compresses(words, found) and degrees(words)["ep"] == int(found[2]),
    ),
    Reason(
        "single operations that compiled code has not",
        r"train\.compile = blocks: memory\.recompute = selective looks at single operations, which "
        r"a compiled block no longer has",
        lambda words, _: words.get("train.compile") == "blocks"
        and words.get("memory.recompute") == "selective",
    ),
    Reason(
        "tokens that do not divide",
        r"layout\.cp = (\d): \w+ works on (\d+) tokens, which do not divide into \1 equal parts",
        lambda words, found: degrees(words)["cp"] == int(found[1])
        and words["data.sequence"] == found[2]
        and int(found[2]) % int(found[1]) != 0,
    ),
    Reason(
        "an optimizer of whole matrices, cut by rows",
        rf"layout\.strategy = .*: cuts every parameter by rows, and (?:{BY_NAME}|\w+: a step on some "
        rf"rows of a parameter {OWN_SHARE})",
        lambda words, _: words.get("optimizer.name") in WHOLE_MATRICES and zero_of(words) == 3,
    ),
    Reason(
        "an optimizer of whole matrices, cut inside",
        rf"layout\.tp(?: = (\d))?: cuts weights inside, and (?:{BY_NAME}|\w+: a step on flat pieces "
        rf"of a parameter {OWN_SHARE})",
        lambda words, found: words.get("optimizer.name") in WHOLE_MATRICES
        and degrees(words)["tp"] == int(found[1] or degrees(words)["tp"]) > 1,
    ),
    Reason(
        "an optimizer of whole matrices, experts cut by rows",
        rf"layout\.ep(?: = (\d))?: cuts stacks of experts by rows, and (?:{BY_NAME}|\w+: a step on "
        rf"some rows of a parameter {OWN_SHARE})",
        lambda words, found: words.get("optimizer.name") in WHOLE_MATRICES
        and degrees(words)["ep"] == int(found[1] or degrees(words)["ep"]) > 1,
    ),
    Reason(
        "dropout beside a choice of experts that no graph holds",
        r"layout\.tp = (\d): blocks\.\d draws random numbers \(dropout in blocks\.\d\.\w+\) and cannot be "
        r"traced \(DataDependentOutputException: .*\), so they may depend on the layout",
        lambda words, found: words["model.name"] == "moe"
        and float(words.get("model.dropout", "0")) > 0
        and degrees(words)["tp"] == int(found[1]),
    ),
)  # fmt: skip
"""What a refusal is about, its line, and when that is true."""
