"""Questions of the first pages: why, ranks, a loop by hand, DDP, targets."""

from __future__ import annotations

from shoal.teach.calculators.collectives_costs import ring_all_reduce_s
from shoal.teach.calculators.scaling import amdahl_limit, amdahl_speedup
from shoal.teach.exercises.exercise import Exercise
from shoal.teach.walks.ddp_walk import FORWARD_S, GRADIENT_BYTES, LAYERS, ddp


def questions() -> tuple[Exercise, ...]:
    """Return the exercises of these pages."""
    return (*_why(), *_ranks(), *_by_hand(), *_ddp(), *_targets())


def _why() -> tuple[Exercise, ...]:
    message, rate, alpha = 2.4e9, 25e9, 20e-6
    ring_ms = 1e3 * ring_all_reduce_s(16, message, alpha, 1 / rate)
    return (
        Exercise(
            "why-1",
            "A step takes 10 s on one device, and 1 s of it cannot be split. How many times as "
            "fast is the step on 16 devices, without any communication?",
            amdahl_speedup(0.1, 16),
            "1/(0.1 + 0.9/16): the step takes 1 + 9/16 s.",
            ("Which seconds become shorter on 16 devices, and which do not?",
             "New step = 1 s + 9 s/16. Divide 10 s by it."),
            ((16.0, "that divides the serial second too"),
             (amdahl_limit(0.1), "that is the limit on endless devices"),
             (14.4, "that is 0.9 · 16; times add up, speed-ups do not")),
        ),
        Exercise(
            "why-2",
            "Gradients are 2.4 GB, a link carries 25 GB/s, a message starts in 20 µs. How long "
            "does a ring all-reduce over 16 devices take?",
            ring_ms,
            "2·15·α + 2·15/16·M/B = 0.6 ms + 180 ms.",
            ("A ring sends 2(N−1) messages of M/N bytes, one after the other.",
             "2·15·20 µs + 2·15/16 · 2.4 GB / (25 GB/s)"),
            ((1e3 * (alpha + message / rate), "that sends M once; a ring sends 2(N−1)/N·M"),
             (2e3 * message / rate, "that sends 2·M; a ring sends a sixteenth less"),
             (1e3 * 30 * message / rate, "that sends all of M in each of 30 rounds; a round "
              "sends M/16")),
            unit="ms",
        ),
    )  # fmt: skip


def _ranks() -> tuple[Exercise, ...]:
    nodes, per_node = 2, 4
    return (
        Exercise(
            "ranks-1",
            "Two nodes have 4 GPUs each, with one process per GPU. Which rank has the process "
            "with LOCAL_RANK=1 on the second node?",
            float(1 * per_node + 1),
            "Rank = node rank · processes per node + local rank = 1 · 4 + 1.",
            ("All four processes of the first node come before.", "Ranks start at 0."),
            ((1.0, "that is its local rank, which every node has"),
             (6.0, "that counts from 1; ranks start at 0"),
             (3.0, "that multiplies by the number of nodes; the second node starts at rank 4")),
        ),
        Exercise(
            "ranks-2",
            "torchrun --nnodes 2 --nproc-per-node 4 starts a job. What is WORLD_SIZE?",
            float(nodes * per_node),
            "All processes of all nodes: 2 · 4.",
            ("A world has one process per GPU, over all nodes.",),
            ((float(per_node), "that is LOCAL_WORLD_SIZE, the processes of one node"),
             (float(nodes), "that is the number of nodes"),
             (float(nodes * per_node - 1), "that is the largest rank")),
        ),
    )  # fmt: skip


def _by_hand() -> tuple[Exercise, ...]:
    weight, rate = 2.0, 0.1
    samples = ((1.0, 4.0), (3.0, 3.0))
    parts = [(weight * x - t) * x for x, t in samples]
    stepped = weight - rate * sum(parts) / 2
    return (
        Exercise(
            "by-hand-1",
            "Two ranks hold w = 2. The loss is ½(w·x − t)². Rank 0 has x = 1, t = 4; rank 1 has "
            "x = 3, t = 3. Which w do both hold after one step with the mean gradient and a "
            "learning rate of 0.1?",
            stepped,
            "Gradients −2 and 9, mean 3.5: 2 − 0.1 · 3.5.",
            ("The gradient of a sample is (w·x − t)·x.", "They are −2 and 9. Take the mean."),
            ((weight - rate * sum(parts), "that uses the sum; DDP takes the mean over ranks"),
             (weight - rate * parts[0], "that is rank 0 alone; nothing was exchanged"),
             (weight - rate * parts[1], "that is rank 1 alone; nothing was exchanged"),
             (weight + rate * sum(parts) / 2, "that goes up the gradient")),
        ),
        Exercise(
            "by-hand-2",
            "Nobody broadcast the first weights: rank 0 starts with w = 2, rank 1 with w = 5. "
            "Every step uses the same mean gradient on both. How far apart are the two weights "
            "after 100 steps of plain SGD?",
            3.0,
            "Both copies move by equal amounts in every step.",
            ("What does an equal step do to the distance of two copies?",),
            ((0.0, "averaging gradients never averages weights"),
             (1.5, "nothing halves the distance; weights are not averaged")),
        ),
    )  # fmt: skip


def _ddp() -> tuple[Exercise, ...]:
    walk = ddp(4, FORWARD_S, 1e-3)
    whole_ms = 1e3 * (walk.timeline.end_s if walk.timeline else 0.0)
    bucket_ms = 1e3 * ring_all_reduce_s(4, GRADIENT_BYTES / 3, 10e-6, 1 / 25e9)
    compute_ms = 1e3 * LAYERS * (FORWARD_S + 1e-3) + 1
    return (
        Exercise(
            "ddp-1",
            "Eight ranks all-reduce 100 MB of gradients in a ring. How much does each rank send?",
            2 * 7 / 8 * 100,
            "2(n−1)/n · M: seven eighths in the reduce-scatter, seven eighths in the all-gather.",
            ("In each round a rank sends one chunk of M/8.", "There are 2 · 7 rounds."),
            ((100.0, "that sends every byte once; a ring has two halves of 7/8 each"),
             (87.5, "that is the reduce-scatter alone; an all-gather follows"),
             (200.0, "that is the limit for endless ranks"),
             (700.0, "that sends the whole message to every other rank")),
            unit="MB",
        ),
        Exercise(
            "ddp-2",
            "In `shoal simulate ddp --backward 0.001` a layer's backward takes 1 ms, while a "
            "bucket's all-reduce takes 6.03 ms. How long is the step?",
            whole_ms,
            "Forward 18 ms, 2 ms until the first bucket is full, three all-reduces in a row, "
            "update 1 ms.",
            ("The link is busy from the first full bucket to the end.",
             "18 ms + 2 ms + 3 all-reduces + 1 ms"),
            ((compute_ms, "that is compute alone; the link is not done when it ends"),
             (compute_ms + 3 * bucket_ms, "that hides nothing; 4 ms of the backward pass overlap"),
             (compute_ms + bucket_ms, "that hides two buckets; a backward of 6 ms is too short")),
            unit="ms",
        ),
    )  # fmt: skip


def _targets() -> tuple[Exercise, ...]:
    counts, means = (10, 2), (2.0, 5.0)
    total = sum(n * loss for n, loss in zip(counts, means, strict=True))
    return (
        Exercise(
            "targets-1",
            "Rank 0 has 10 targets with a mean loss of 2, rank 1 has 2 targets with a mean loss of "
            "5. What is the mean loss of all targets?",
            total / sum(counts),
            "(10 · 2 + 2 · 5) / 12.",
            ("Add up the loss of every target first.", "20 + 10, over 12 targets."),
            ((sum(means) / 2, "that is the mean of the ranks' means: 2 targets weigh as much as "
              "10"),
             (total, "that is the sum over all targets"),
             (sum(means), "that adds means")),
        ),
        Exercise(
            "targets-2",
            "The same two ranks use DDP, which averages gradients over ranks. By which factor must "
            "rank 0 multiply its mean loss so that the gradient is that of the mean over all 12 "
            "targets?",
            2 * counts[0] / sum(counts),
            "Ranks · own targets / all targets = 2 · 10/12.",
            ("The right gradient is Σ n_r/12 · g_r.", "DDP gives ½ Σ f_r · g_r. Compare."),
            ((counts[0] / sum(counts), "DDP still divides by 2 ranks afterwards"),
             (1.0, "then the ranks weigh the same"),
             (float(counts[0]), "that is a sum; who divides by 12?")),
        ),
    )  # fmt: skip
