"""How many samples a validation may run at once without needing more memory than a training step.

    room    = a step's peak − weights − gradients − optimizer state − gathered weights
    sample  = what the largest unit would keep for a backward, its input and its output: without
              gradients only one unit's activations are alive at a time, and nothing is kept
    at once = room ÷ sample, in whole micro-batches of training

What a unit keeps for a backward stands for what its forward holds; it is more, and so errs to the
safe side, as does counting it whole where tensor parallelism splits it.
"""

from __future__ import annotations

from shoal.base.estimate import Case, MemoryEstimate
from shoal.planner.transient_memory import CHUNK_BYTES

MOST = 16
"""Training micro-batches at once: beyond that single operations cost little beside their work."""


def validation_micro_batch(case: Case, estimate: MemoryEstimate) -> int:
    """Choose the samples per forward pass of a validation that fit a training step's peak.

    A multiple of the training micro-batch, 1 to 16 times it; once where the room is not known (of
    zero 3 at a peak that holds no gathered weights).

    estimate   `predict_memory(case)`

    >>> from shoal.base.cluster import Cluster, Device, Link
    >>> from shoal.base.layout import Layout
    >>> from shoal.base.plan import Plan
    >>> from shoal.planner.memory import predict_memory
    >>> from shoal.planner.published import published
    >>> from shoal.planner.transformer import model_facts
    >>> link = Link("wire", 1e-6, 1e11)
    >>> node = Cluster(Device("d", 80e9, {}, 1e12), 1, 8, link, link)
    >>> plan = Plan(Layout(tp=8), 16, 2, compute="bf16")
    >>> case = Case(model_facts(published("llama-3-8b"), 8192, 2), node, plan)
    >>> validation_micro_batch(case, predict_memory(case))
    12
    """
    states = ("weights", "gradients", "optimizer", "gathered")
    room = estimate.allocated_bytes - sum(estimate.parts.get(name, 0.0) for name in states)
    units = case.model.units
    sample = max(u.saved_split_bytes + u.saved_plain_bytes + 2 * u.input_bytes for u in units)
    loss = max(u.loss_bytes for u in units)
    # Where parameters are gathered, the peak of an update says nothing of what a forward gathers.
    blind = case.layout.zero == 3 and not estimate.parts.get("gathered")
    if blind or sample <= 0:
        return case.micro_batch
    fit = room / (sample + loss)
    if case.loss == "chunked":  # its logits are never more than a chunk of them
        chunk = CHUNK_BYTES["cpu" if case.cluster.device.kind == "cpu" else "gpu"]
        fit = max(fit, (room - chunk) / sample)
    times = int(fit // case.micro_batch)
    return case.micro_batch * min(max(times, 1), MOST)
