"""Questions about runs: precision and memory, failures, planning, proving, puzzles, bugs."""

from __future__ import annotations

import math
import struct

from shoal.teach.calculators import goodput, utilisation
from shoal.teach.exercises.exercise import Exercise
from shoal.teach.puzzles import get_puzzle, score
from shoal.teach.walks.zero_walk import formula_bytes


def questions() -> tuple[Exercise, ...]:
    """Return the exercises of these pages."""
    return (*_precision(), *_failures(), *_planning(), *_proving(), *_puzzles(), *_bugs())


def _precision() -> tuple[Exercise, ...]:
    return (
        Exercise(
            "precision-1",
            "A model of 3 billion parameters trains in bf16 with fp32 master weights, two fp32 "
            "moments and bf16 gradients. How many GB of states does one GPU hold?",
            formula_bytes(0, 1, 3e9) / 1e9,
            "2 + 2 + 4 + 4 + 4 = 16 bytes per parameter.",
            ("Weights 2, gradients 2: what else does Adam keep?",
             "Master 4, first moment 4, second moment 4."),
            ((6.0, "that is the weights alone"), (12.0, "Adam keeps 12 bytes more per parameter"),
             (36.0, "that is the optimizer alone"),
             (24.0, "moments are fp32, and so is the master")),
            unit="GB",
        ),
        Exercise(
            "precision-2",
            "A step has 512 samples. 8 ranks take micro-batches of 4. How many micro-batches does "
            "each rank accumulate?",
            512 / 8 / 4,
            "batch = micro-batch · accumulate · data-parallel ranks.",
            ("A rank's share is 512/8 samples.", "64 samples in pieces of 4."),
            ((128.0, "the other seven ranks work too"),
             (64.0, "that is samples, not micro-batches"),
             (2.0, "that multiplies where it must divide")),
        ),
    )  # fmt: skip


def _failures() -> tuple[Exercise, ...]:
    stall, hours = 60.0, 3.1
    mean = hours * goodput.HOUR
    return (
        Exercise(
            "failures-1",
            "A GPU fails once in 5 years (43,800 hours), and any failure stops the run. How many "
            "hours lie between two failures of a run on 1000 GPUs, on average?",
            goodput.mtbf_s(1000, 43_800.0),
            "43,800 h / 1000.",
            ("1000 GPUs fail 1000 times as often as one.",),
            ((43_800.0, "that is one GPU"), (5.0, "that is years of one GPU"),
             (43.8 / 24, "that is days")),
            unit="h",
        ),
        Exercise(
            "failures-2",
            "A save stalls the run for 60 s. Failures come every 3.1 hours. After how many seconds "
            "of work should it save, by Young's formula?",
            goodput.young_interval_s(stall, mean),
            "√(2 · 60 s · 11,160 s).",
            ("Young: √(2·C·M).", "M = 3.1 · 3600 s."),
            (((stall * mean) ** 0.5, "the formula has a factor 2 under the root"),
             (goodput.young_interval_s(stall, hours), "convert hours to seconds"),
             (mean / 2, "then a failure costs an hour and a half of work")),
            unit="s",
        ),
    )  # fmt: skip


def _planning() -> tuple[Exercise, ...]:
    tokens_per_s, peak = 80e3, 989e12
    share = 100 * utilisation.mfu(tokens_per_s, 6 * 8e9, 8, peak)
    return (
        Exercise(
            "planning-1",
            "How many GB of states does each of 64 GPUs hold for a model of 70 billion parameters "
            "under FSDP, at 16 bytes per parameter?",
            formula_bytes(3, 64, 70e9) / 1e9,
            "16 · 70/64.",
            ("FSDP cuts all 16 bytes over all ranks.",),
            ((70 * 2 / 64, "that is the weights alone"), (16 * 70.0, "that is one GPU alone"),
             (2 * 70 + 14 * 70 / 64, "that is ZeRO-2")),
            unit="GB",
        ),
        Exercise(
            "planning-2",
            "8 H100 of 989 TFLOP/s train a model of 8 billion parameters at 80,000 tokens per "
            "second. What is the MFU, with 6·N FLOP per token?",
            share,
            "6 · 8e9 · 80,000 / (8 · 989e12).",
            ("6·N FLOP per token, forward and backward.", "The peak of all 8 GPUs is below it."),
            ((share * 8, "that is the peak of one GPU"), (share / 3, "that is the forward pass "
             "alone: 2·N"), (share / 2, "1979 TFLOP/s is the peak of sparse matrices")),
            unit="%",
        ),
    )  # fmt: skip


def _proving() -> tuple[Exercise, ...]:
    stored = struct.unpack("f", struct.pack("f", 1e8 + 1.0))[0]
    return (
        Exercise(
            "proving-1",
            "A layout and one process differ by 1e-7 of the gradient's norm, in float64. Is that "
            "rounding or a bug?",
            "bug",
            "float64 rounds at 1e-16; sums of millions of terms stay below 1e-12.",
            ("How many digits has float64?", "About 16; 1e-7 is nine digits too early."),
            (("rounding", "that would be usual in float32; float64 keeps nine digits more"),
             ("neither", "runs of one arithmetic differ by rounding or by what they compute")),
            choices=("rounding", "bug", "neither"),
        ),
        Exercise(
            "proving-2",
            "In float32, what is (100,000,000 + 1) − 100,000,000?",
            stored - 1e8,
            "Neighbours of 1e8 in float32 are 8 apart, so the 1 is lost. Order of sums matters.",
            ("float32 keeps 24 bits: about 7 digits.", "Which float32 is nearest to 100,000,001?"),
            ((1.0, "that needs 27 bits"), (8.0, "the sum rounds down, not up")),
        ),
    )  # fmt: skip


def _puzzles() -> tuple[Exercise, ...]:
    puzzle = get_puzzle(0)
    steps = score(puzzle.reference())[0]
    last = steps - 0.5
    return (
        Exercise(
            "puzzles-1",
            f"In puzzle 0 one rank has {puzzle.layers} layers and {puzzle.batches} batch elements. "
            "A forward or a backward takes one step per element, an update 0.5. The score is the "
            "start of the last event. What is the fewest steps that a program can score?",
            steps,
            f"{puzzle.layers} · {puzzle.batches} · 2 = {last:g} steps of passes; the first update "
            "runs from then on, and the second starts 0.5 later.",
            ("Count the passes: layers · elements · 2.", "Which event is the last, and when does "
             "it start?"),
            ((steps + 0.5, "that is the end of the last update; its start is what counts"),
             (last, "that is where the first update starts; a rank does one thing at a time"),
             (last / 2, "the backward pass takes as long again")),
        ),
    )  # fmt: skip


def _bugs() -> tuple[Exercise, ...]:
    parts = (3.0, 4.0)
    return (
        Exercise(
            "bugs-1",
            "Two ranks hold the halves of a gradient. The norm of one half is 3, that of the other "
            "is 4. By which norm must both ranks clip?",
            math.hypot(*parts),
            "√(3² + 4²): squares of parts add up, norms do not.",
            ("What is the norm of the whole gradient?", "Add the squares of both norms first."),
            ((sum(parts), "that adds norms; their squares add up"),
             (max(parts), "that is one rank's part; then the other clips by another factor"),
             (sum(parts) / 2, "that is a mean of norms, smaller than the larger part's")),
        ),
    )  # fmt: skip
