"""Gradient compression of `layout.compress`: the method, and the layouts that support it."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.base.errors import ConfigError, PlanError, format_choice_error
from shoal.base.layouts.policies import BY_NUMBER, COMPRESS

WHOLE_SHARE = 3
"""One in so many of a run's steps travels in int8 before one-bit, if the user sets no number.
Of 1/5, 1/4 and 1/3 of 300 steps the smallest that cost less than 0.5 % of fsdp's loss, on seeds
used for no other choice (`benchmarks/one_bit.py`).
"""


@dataclass(frozen=True)
class Compression:
    """Compression method of `layout.compress` and its number; `Compression.parse(text)` reads one.

    Attributes:
        method: none, int8, one-bit, powersgd, topk.
        rank: powersgd: columns of the two thin matrices.
        share: topk: share of the elements that a rank sends.
        early: one-bit: steps at the start of a run in which gradients travel as int8; −1: a third
            of the run's, see `warmup_steps`.
    """

    method: str = "none"
    """none, int8, one-bit, powersgd, topk"""
    rank: int = 4
    """powersgd: columns of the two thin matrices that stand for one gradient"""
    share: float = 0.01
    """topk: share of the elements that a rank sends"""
    early: int = 0
    """one-bit: steps at the start of a run in which gradients travel as int8; −1: a third"""

    @staticmethod
    def parse(text: str) -> Compression:
        """Parse the text of `layout.compress`.

        Raises a ConfigError with the nearest right spelling.

        >>> Compression.parse("powersgd:2").rank, Compression.parse("topk").share
        (2, 0.01)
        """
        method, colon, number = text.partition(":")
        if method not in COMPRESS:
            raise ConfigError(format_choice_error("layout.compress", text, COMPRESS))
        if not colon:
            return Compression(method, early=-1 if method == "one-bit" else 0)
        if method == "powersgd":
            if number.isdecimal() and int(number) >= 1:
                return Compression(method, rank=int(number))
            wanted = "a rank of at least 1 is wanted; try: layout.compress=powersgd:1"
        elif method == "one-bit":
            if number.isdecimal():
                return Compression(method, early=int(number))
            wanted = "a number of steps is wanted; try: layout.compress=one-bit:100"
        elif method == "topk":
            share = _number(number)
            if 0 < share <= 1:
                return Compression(method, share=share)
            wanted = "a share above 0 and up to 1 is wanted; try: layout.compress=topk:0.01"
        else:
            wanted = f"{method} takes no number; try: layout.compress={method}"
        raise ConfigError(f"layout.compress = {text}: {wanted}")

    def warmup_steps(self, total_steps: int) -> int:
        """Return how many first steps of a run send int8 gradients, before `method` starts.

        Args:
            total_steps: optimizer steps of the run; 0: unknown.

        Returns:
            `early` if it is set, else a third of `total_steps`.

        Raises:
            ConfigError: a third of an unknown number is needed.

        >>> (
        ...     Compression.parse("one-bit").warmup_steps(300),
        ...     Compression.parse("one-bit:7").warmup_steps(0),
        ... )
        (100, 7)
        """
        if self.early >= 0:
            return self.early
        if total_steps < 1:
            raise ConfigError(
                f"layout.compress = {self.method}: the first third of the run's steps travels in "
                f"int8, and nobody said how many it has; try: total_steps=…, or "
                f"compress={self.method}:100"
            )
        return total_steps // WHOLE_SHARE


def check_compression(
    text: str, strategy: str, precision: str = "", reduce: str = "", ep: int = 1
) -> None:
    """Refuse a `layout.compress` that a layout or a number format does not support.

    Args:
        text: value of the key.
        ep: expert-parallel degree; compression needs 1.
        strategy: strategy of the data-parallel axes (`Layout.data_strategy`), whatever else is
            split. hsdp supports no method; zero1, zero2, zero3 and fsdp support the element-wise
            methods; other strategies support all.
        precision, reduce: formats of matrix products and of sums: not fp16, not bf16.

    Raises:
        ConfigError: the text is no method; PlanError with the nearest legal choice.
    """
    method = Compression.parse(text).method
    if method == "none":
        return
    if ep > 1:
        raise PlanError(
            f"layout.compress = {text}: sums over all data-parallel ranks, and layout.ep = {ep} "
            f"sums experts over some; try: layout.compress=none"
        )
    if strategy == "hsdp":
        nearest = "fsdp" if method in BY_NUMBER else "ddp"
        raise PlanError(
            f"layout.compress = {text}: hsdp sums its parts over replicas inside fully_shard, "
            f"which cannot encode; try: layout.strategy={nearest}, or layout.compress=none"
        )
    if strategy in ("zero1", "zero2", "zero3", "fsdp") and method not in BY_NUMBER:
        raise PlanError(
            f"layout.compress = {text}: {strategy} cuts gradients where no matrix ends and gives "
            f"each rank its part only, which codes number by number carry; try: "
            f"layout.compress=int8, or layout.strategy=ddp"
        )
    if precision == "fp16":
        raise PlanError(
            f"layout.compress = {text}: fp16's loss scale changes between steps, and what one step "
            f"leaves out would be added in the next in another scale; try: "
            f"precision.compute=bf16"
        )
    if reduce == "bf16":
        raise PlanError(
            f"layout.compress = {text}: precision.reduce = bf16 would round what error feedback "
            f"must see whole; try: precision.reduce=auto"
        )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
