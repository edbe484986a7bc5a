"""Tensor parallelism step by step: an MLP's first matrix cut by columns, its second by rows.

    y = relu(x·A)·B        A = [A_0 … A_(n−1)] by columns, B the same cut by rows

Rank r computes h_r = relu(x·A_r) and p_r = h_r·B_r without a message, since relu works on each
number alone; y is the sum of all p_r: one all-reduce. The backward pass is the mirror: dx is the
sum of the ranks' parts, one more all-reduce. Attention is cut the same way, by heads, so a block
needs 2 + 2 all-reduces of one activation per micro-batch.

Source: Shoeybi et al. 2019 (Megatron-LM), §3; Korthikanti et al. 2022 (sequence parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.base.text.units import bytes_text
from shoal.teach.walks.walk import StepThrough, TableCell, WalkStep, check_equal, check_ranks

Matrix = list[list[int]]

INPUTS, PER_RANK = 2, 2
"""Numbers of x, and hidden numbers per rank."""

HIDDEN, TOKENS, NUMBER_BYTES = 4096, 8192, 2
"""Width, tokens of a micro-batch and bytes per number of the real block that the facts describe."""

REDUCES_PER_BLOCK = 4
"""All-reduces of a block: attention and MLP, each once forward and once backward."""


@dataclass
class _RankPart:
    """Parts of one rank: its columns of A, its rows of B, and what it has computed."""

    a: Matrix
    b: Matrix
    h: list[int]
    p: list[int]
    dx: list[int]


def product(row: list[int], matrix: Matrix) -> list[int]:
    """Return a row times a matrix.

    >>> product([1, 2], [[1, 0], [3, 1]])
    [7, 2]
    """
    return [
        sum(x * line[j] for x, line in zip(row, matrix, strict=True)) for j in range(len(matrix[0]))
    ]


def transpose(matrix: Matrix) -> Matrix:
    """Return a matrix with rows and columns exchanged.

    >>> transpose([[1, 2], [3, 4]])
    [[1, 3], [2, 4]]
    """
    return [list(column) for column in zip(*matrix, strict=True)]


def first_matrices(ranks: int) -> tuple[Matrix, Matrix]:
    """Return A [inputs, hidden] and B [hidden, inputs], of small integers."""
    hidden = ranks * PER_RANK
    a = [[(3 * i + 2 * j + i * j) % 5 - 2 for j in range(hidden)] for i in range(INPUTS)]
    b = [[(2 * i + 3 * j) % 5 - 1 for j in range(INPUTS)] for i in range(hidden)]
    return a, b


def _forward(x: list[int], a: Matrix, b: Matrix) -> tuple[list[int], list[int]]:
    """Return (h, y) of an MLP, or of one rank's part of it."""
    h = [max(0, number) for number in product(x, a)]
    return h, product(h, b)


def _input_gradient(dy: list[int], h: list[int], a: Matrix, b: Matrix) -> list[int]:
    """Return dx of an MLP, or one rank's part of it."""
    dh = [g if kept > 0 else 0 for g, kept in zip(product(dy, transpose(b)), h, strict=True)]
    return product(dh, transpose(a))


def tp(ranks: int) -> StepThrough:
    """Show one MLP under tensor parallelism, forward and backward.

    Raises:
        PlanError: a number of ranks that cannot be shown.

    >>> walk = tp(2)
    >>> len({row[3].text for row in walk.steps[2].cells})
    1
    >>> walk.facts["one activation"]
    '64.0 MiB'
    """
    check_ranks("tensor parallelism", ranks)
    x, dy = [2, 1], [1, -1]
    a, b = first_matrices(ranks)
    parts = []
    for rank in range(ranks):
        own = slice(rank * PER_RANK, (rank + 1) * PER_RANK)
        a_r, b_r = [line[own] for line in a], b[own]
        h, p = _forward(x, a_r, b_r)
        parts.append(_RankPart(a_r, b_r, h, p, _input_gradient(dy, h, a_r, b_r)))
    y = [sum(part.p[i] for part in parts) for i in range(INPUTS)]
    dx = [sum(part.dx[i] for part in parts) for i in range(INPUTS)]
    right_h, right_y = _forward(x, a, b)
    check_equal("h of all ranks", [number for part in parts for number in part.h], right_h)
    check_equal("y", y, right_y)
    check_equal("dx", dx, _input_gradient(dy, right_h, a, b))
    activation_bytes = HIDDEN * TOKENS * NUMBER_BYTES
    sent_bytes = REDUCES_PER_BLOCK * 2 * (ranks - 1) / ranks * activation_bytes
    return StepThrough(
        title=f"Tensor parallelism, {ranks} ranks: y = relu(x·A)·B",
        story=(
            "Every rank gets the same x. Rank r holds some columns of A and the same rows of B. "
            "It computes its part of h, and from that a part of y, without any message.",
            "One all-reduce adds the parts of y. The backward pass needs one more, for dx; the "
            "gradients of A and B stay where their columns and rows are.",
        ),
        rows=tuple(f"rank {rank}" for rank in range(ranks)),
        columns=("x", "A columns", "h", "y", "dx"),
        start=_cells(parts, x, shown=()),
        steps=(
            WalkStep("forward, A by columns", ("h_r = relu(x·A_r)", "no message"),
                     _cells(parts, x, ("h",))),
            WalkStep("forward, B by rows", ("p_r = h_r·B_r: a part of every number of y",),
                     _cells(parts, x, ("h", "p"))),
            WalkStep("all-reduce of y", ("y = p_0 + … + p_(n−1)",),
                     _cells(parts, x, ("h",), y=y), "the next layer gets the whole y"),
            WalkStep("backward", (f"dy = {_text(dy)} is on every rank", "no message"),
                     _cells(parts, x, ("h", "dx"), y=y)),
            WalkStep("all-reduce of dx", ("dx = sum of the ranks' parts",),
                     _cells(parts, x, ("h",), y=y, dx=dx)),
        ),
        checked=f"y = {_text(right_y)}, every part of h and dx = {_text(dx)} are those of one "
        "process",
        looks={"own": "its own part", "part": "one term of a sum", "whole": "the same on all"},
        facts={
            "one activation": bytes_text(activation_bytes),
            "each rank sends per block and micro-batch": f"{bytes_text(sent_bytes)} = "
            f"{REDUCES_PER_BLOCK} · 2(n−1)/n·M",
            "for": f"width {HIDDEN}, {TOKENS} tokens, bf16",
        },
    )  # fmt: skip


def _text(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


def _cells(
    parts: list[_RankPart],
    x: list[int],
    shown: tuple[str, ...],
    y: list[int] | None = None,
    dx: list[int] | None = None,
) -> tuple[tuple[TableCell, ...], ...]:
    """Return the table: what each rank holds of x, A, h, y and dx."""
    nothing = TableCell("", "none")
    rows = []
    for rank, part in enumerate(parts):
        columns = f"c{rank * PER_RANK} c{rank * PER_RANK + PER_RANK - 1}"
        own_y = TableCell(_text(part.p), "part") if "p" in shown else nothing
        own_dx = TableCell(_text(part.dx), "part") if "dx" in shown else nothing
        rows.append((
            TableCell(_text(x), "whole"),
            TableCell(columns, "own"),
            TableCell(_text(part.h), "own") if "h" in shown else nothing,
            TableCell(_text(y), "whole") if y is not None else own_y,
            TableCell(_text(dx), "whole") if dx is not None else own_dx,
        ))  # fmt: skip
    return tuple(rows)
