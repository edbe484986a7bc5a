"""Questions about layouts: ZeRO and FSDP, pipelines, inside layers, DiLoCo, parameter servers."""

from __future__ import annotations

from fractions import Fraction

from shoal.forecast.time.server_costs import simulate_pace
from shoal.teach.calculators.pipeline import bubble_of_ideal, bubble_of_step
from shoal.teach.exercises.exercise import Exercise
from shoal.teach.walks.local_steps_walk import SharedWeights
from shoal.teach.walks.pipelines_walk import PipelineCase, pipeline
from shoal.teach.walks.tp_walk import HIDDEN, NUMBER_BYTES, TOKENS
from shoal.teach.walks.zero_walk import formula_bytes

MIB = 2**20


def questions() -> tuple[Exercise, ...]:
    """Return the exercises of these pages."""
    return (*_sharding(), *_pipelines(), *_inside(), *_diloco(), *_servers())


def _sharding() -> tuple[Exercise, ...]:
    gb = [formula_bytes(stage, 8, 7e9) / 1e9 for stage in range(4)]
    return (
        Exercise(
            "sharding-1",
            "A model of 7 billion parameters trains with Adam in bf16 over fp32 masters, 16 bytes "
            "per parameter in all. How many GB of states does each of 8 ranks hold under ZeRO-2?",
            gb[2],
            "2·P whole weights and 14·P/8 of gradients and optimizer state.",
            ("Weights (2 bytes) stay whole; gradients (2) and optimizer state (12) are cut.",
             "2 · 7 + 14 · 7/8"),
            ((gb[0], "that cuts nothing"), (gb[1], "that is ZeRO-1: gradients are still whole"),
             (gb[3], "that is ZeRO-3: weights are cut too"),
             (14.0 / 8 * 7, "the weights, 2 bytes per parameter, stay whole")),
            unit="GB",
        ),
        Exercise(
            "sharding-2",
            "A step has 4 micro-batches. DDP all-reduces gradients once per step. FSDP gathers "
            "weights twice and reduce-scatters gradients once per micro-batch, all in "
            "bf16. How many times DDP's bytes does FSDP send?",
            4 * 3 / 2,
            "Per micro-batch 3(n−1)/n·P elements, four times, against 2(n−1)/n·P once.",
            ("One gather or scatter of P sends (n−1)/n·P.", "FSDP 4 · 3, DDP 2."),
            ((1.5, "that is one micro-batch"),
             (3.0, "an all-reduce is two halves, each as large as a gather"),
             (12.0, "that divides by one half of the all-reduce"), (4.0, "it gathers twice")),
        ),
    )  # fmt: skip


def _pipelines() -> tuple[Exercise, ...]:
    share = 100 * bubble_of_step("1f1b", 4, 12)
    line = pipeline("1f1b", PipelineCase(ranks=8, micro_batches=32))
    return (
        Exercise(
            "pipelines-1",
            "A pipeline of 4 ranks runs 12 micro-batches under 1F1B. Which share of the step is "
            "each rank idle?",
            share,
            "(p−1)/(m + p−1) = 3/15.",
            ("A rank waits for p−1 micro-batches' worth of time.",
             "The step lasts m + p−1 such units."),
            ((100 * bubble_of_ideal("1f1b", 4, 12), "that is the bubble relative to the work; "
              "the step is longer than the work"),
             (100 * 4 / 15, "a rank waits for the other three, not for itself")),
            unit="%",
        ),
        Exercise(
            "pipelines-2",
            "8 ranks run 32 micro-batches under 1F1B. How many micro-batches' activations does "
            "rank 2 hold at most?",
            line.peak_bytes(2),
            "p − i: the micro-batches between rank 2 and the end of the pipeline.",
            ("Rank 7 starts a backward right after its forward: it holds 1.",
             "One more for each rank further up."),
            ((32.0, "that is GPipe, which holds all of them"), (8.0, "that is rank 0"),
             (5.0, "ranks 2 to 7 are six"), (3.0, "it holds those on the way below it")),
        ),
    )  # fmt: skip


def _inside() -> tuple[Exercise, ...]:
    one = HIDDEN * TOKENS * NUMBER_BYTES / MIB
    ranks = 8
    return (
        Exercise(
            "inside-layers-1",
            "A block has width 4096. A micro-batch has 8192 tokens in bf16. Tensor parallelism "
            "uses 8 ranks and four ring all-reduces per block. How many MiB does each rank send "
            "per block and micro-batch?",
            4 * 2 * (ranks - 1) / ranks * one,
            "4 · 2·7/8 · 64 MiB.",
            ("One activation is 4096 · 8192 · 2 bytes = 64 MiB.",
             "A ring all-reduce sends 2·7/8 of it."),
            ((2 * 2 * (ranks - 1) / ranks * one, "that is the forward pass alone"),
             (4 * one, "a ring sends 2(n−1)/n of a message, not all of it once"),
             (8 * one, "a ring sends 2·7/8 of a message, not 2"), (one, "that is one activation")),
            unit="MiB",
        ),
        Exercise(
            "inside-layers-2",
            "Ring attention is causal, on 8 ranks, and rank r holds block r. How many times as "
            "long as the mean does the busiest rank compute attention?",
            ranks / ((ranks + 1) / 2),
            "The last rank attends to 8 blocks, the mean is 4.5.",
            ("Rank r attends to r + 1 blocks.", "Mean of 1 … 8?"),
            ((8.0, "that compares with rank 0"), (1.0, "later blocks see more"),
             (4.5, "that is the mean number of blocks"), (2.0, "that is the limit for many ranks")),
        ),
    )  # fmt: skip


def _diloco() -> tuple[Exercise, ...]:
    islands = [Fraction(8), Fraction(4)]
    half = SharedWeights([], outer_rate=Fraction(1, 2), momentum=Fraction(0), merged=Fraction(10))
    half.outer_step(islands)
    return (
        Exercise(
            "diloco-1",
            "Four islands train a model of 1 billion parameters in fp32 and meet every 50 steps in "
            "a ring. How many MB does each island send per inner step, on average?",
            2 * 3 / 4 * 4e9 / 50 / 1e6,
            "2·3/4 · 4 GB per round, over 50 steps.",
            ("One message is 4 bytes per parameter.", "2(R−1)/R · 4 GB / 50"),
            ((2 * 3 / 4 * 4e3, "that meets in every step"),
             (4e3 / 50, "a ring sends 2(R−1)/R of the message"),
             (2 * 3 / 4 * 2e3 / 50, "fp32 has 4 bytes")),
            unit="MB",
        ),
        Exercise(
            "diloco-2",
            "W is 10. Two islands end a round at 8 and 4. The outer rate is 0.5, without momentum. "
            "What is the new W?",
            float(half.merged),
            "Δ = 10 − 6 = 4, and W − 0.5 · 4.",
            ("Δ is W minus the mean of the islands.", "W moves by rate · Δ."),
            ((6.0, "that is an outer rate of 1: plain averaging"), (4.0, "that is Δ"),
             (12.0, "the outer step goes towards the islands"), (7.0, "the mean of 8 and 4 is 6")),
        ),
    )  # fmt: skip


def _servers() -> tuple[Exercise, ...]:
    even = simulate_pace([1.0] * 4)
    return (
        Exercise(
            "servers-1",
            "Four equal workers send gradients to one server, asynchronously. How many steps does "
            "a gradient miss when the server applies it, on average?",
            float(round(even.staleness)),
            "While one worker computes, each of the other three steps once.",
            ("Who else steps between a worker's reading and its sending?",),
            ((0.0, "that is a synchronous server"), (4.0, "a worker does not overtake itself"),
             (1.0, "three others step, not one")),
        ),
        Exercise(
            "servers-2",
            "Three workers take 0.25 s per gradient and one takes 1 s. A synchronous server waits "
            "for all four; an asynchronous one for none. How many times as many gradients per "
            "second does the asynchronous one apply?",
            (3 / 0.25 + 1) / (4 / 1.0),
            "13 gradients per second against 4.",
            ("Synchronous: four gradients per second, as the slowest sets the pace.",
             "Asynchronous: 3 · 4 + 1."),
            ((4.0, "the slow worker stays slow"), (13.0, "that is its rate, not the ratio"),
             (3.0, "the slow worker sends gradients too")),
        ),
    )  # fmt: skip
