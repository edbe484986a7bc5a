"""Table of `shoal simulate`: one entry per subject, with the options that it reads.

To add one: write a function `Asked -> Shown` in `simulate_shows.py` (or a calculator's screen) and
a line here. Nothing heavy is imported by this table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SimulateRequest:
    """One request of `shoal simulate`.

    Attributes:
        what: a key of WHATS.
        words: the further words on the command line.
        options: the user's options: flag, as "--ranks" → number.
        program: file of a puzzle's program; "" for none.
    """

    what: str
    words: tuple[str, ...]
    options: dict[str, float]
    program: str = ""

    def number(self, name: str, otherwise: int) -> int:
        """Return the value of an integer option."""
        return int(self.options.get(name, otherwise))


@dataclass(frozen=True)
class Entry:
    """One subject of `shoal simulate`.

    Attributes:
        group: heading of the list under which it stands.
        text: one line about it.
        function: its function's name in `simulate_shows`; CALCULATOR: `store_correction.calculate`
        answers. takes: options that it reads.
        words: further words, as the list shows them; "" for none.
    """

    group: str
    text: str
    function: str
    takes: tuple[str, ...] = ()
    words: str = ""


CALCULATOR = "calculator"
"""Function of the entries that `teach/calculate.py` answers; their help line stands there."""

_MOVE, _CUT = "Step by step: moving data", "Step by step: cutting up what is held"
_PIPE, _PUZZLE = "Over time: pipelines", "Puzzles and exercises"
_SENT = ("--ranks", "--bytes")
_SECONDS = ("--ranks", "--micro-batches", "--forward", "--backward", "--weight")

WHATS: dict[str, Entry] = {
    "ring": Entry(_MOVE, "all-reduce in a ring, chunk by chunk", "collective", _SENT),
    "halving": Entry(_MOVE, "all-reduce by recursive halving, then doubling", "collective", _SENT),
    "tree": Entry(_MOVE, "all-reduce up and down a tree", "collective", _SENT),
    "broadcast": Entry(_MOVE, "one rank's data to all, by doubling", "collective", _SENT),
    "all-gather": Entry(_MOVE, "everybody's chunk to everybody", "collective", _SENT),
    "reduce-scatter": Entry(_MOVE, "each rank gets the sum of its own chunk", "collective", _SENT),
    "fsdp": Entry(
        _CUT,
        "gather, compute, free; what is held over time",
        "fsdp",
        ("--ranks", "--micro-batches", "--forward", "--backward"),
    ),
    "ddp": Entry(
        _CUT,
        "gradients in buckets, all-reduced during the backward pass",
        "ddp",
        ("--ranks", "--forward", "--backward", "--bytes"),
    ),
    "zero": Entry(_CUT, "ZeRO stages 0 to 3: who holds what, what it costs", "zero", ("--ranks",)),
    "tp": Entry(_CUT, "tensor parallelism: matrices by columns, then rows", "walk", ("--ranks",)),
    "cp": Entry(_CUT, "context parallelism: keys and values in a ring", "walk", ("--ranks",)),
    "ep": Entry(_CUT, "expert parallelism: tokens to experts and back", "walk", ("--ranks",)),
    "local-steps": Entry(_CUT, "DiLoCo: steps alone, then one exchange", "walk", ("--ranks",)),
    "gpipe": Entry(_PIPE, "all forwards, then all backwards (afab)", "pipeline", _SECONDS),
    "1f1b": Entry(_PIPE, "one forward, one backward: less memory", "pipeline", _SECONDS),
    "interleaved": Entry(
        _PIPE, "several pieces per rank: less bubble", "pipeline", (*_SECONDS, "--chunks")
    ),
    "zero-bubble": Entry(_PIPE, "weights' gradients fill the bubble (ZB-H1)", "pipeline", _SECONDS),
    "zbv": Entry(_PIPE, "the same with pieces in a V: no bubble", "pipeline", _SECONDS),
    "dualpipe": Entry(_PIPE, "fed from both ends (DeepSeek-V3)", "pipeline", _SECONDS),
    "afab-vs-1f1b": Entry(_PIPE, "both on one scale, and what differs", "afab", _SECONDS),
    "puzzles": Entry(_PUZZLE, "all eight: targets, the author's programs, ours", "puzzles"),
    "puzzle": Entry(
        _PUZZLE, "one of them; --program FILE: yours", "puzzle", ("--program",), words="N"
    ),
    "exercise": Entry(_PUZZLE, "a question of the learning pages", "exercise", words="NAME"),
    **{
        word: Entry("Calculators, with NAME=VALUE behind", "", CALCULATOR, words="…")
        for word in (
            "amdahl", "scaling", "collectives", "bubble", "mfu", "checkpoints", "goodput",
            "failures", "stragglers", "servers", "diloco", "islands",
        )
    },
}  # fmt: skip
"""By the name that the user types, in the order of the list."""

ALIASES = {
    "afab": "gpipe",
    "ring-all-reduce": "ring",
    "all-reduce": "ring",
    "halving-doubling": "halving",
    "zero3": "fsdp",
    "zb-h1": "zero-bubble",
    "zb-v": "zbv",
    "gather": "all-gather",
    "tensor-parallel": "tp",
    "ring-attention": "cp",
    "experts": "ep",
}
