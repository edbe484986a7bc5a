"""Reads a profile of some training steps: the device's work, its idle time, and the first cause in words.

    step = work of the device by kind of kernel + idle time
    idle = after waits     the host was blocked until the device had drained, then had to launch anew
         + for launches    the next kernel's launch returned after the device was done: the host is slow
         + latency         the kernel was launched in time and began late (other streams, short kernels)

The profiler slows the host, so idle time is what is left of a step measured without it; its parts
keep the proportions of the profile. Durations of kernels hold under the profiler too. The input is a
trace of `torch.profiler.profile().export_chrome_trace`, whose times are microseconds.
Source: Kineto's trace events (libkineto/README.md): a kernel has the correlation of its launch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
PRODUCTS, ATTENTION, COPIES, OTHER = (
    "matrix products",
    "attention",
    "copies and casts",
    "element-wise",
)
KINDS = (
    ("compiled code", r"^triton_"),
    ("collectives", r"nccl"),
    (ATTENTION, r"flash|fmha|sdpa|attention"),
    (PRODUCTS, r"nvjet|gemm|gemv|cutlass|xmma|splitK|sm\d\d_"),
    ("optimizer", r"multi_tensor_apply|fused_adam"),
    (COPIES, r"copy|Memcpy|CatArray|chunk_cat|split_with_sizes"),
    ("norms", r"layer_norm|rms_norm|LayerNorm|RowwiseMoments|GammaBeta"),
    ("loss and lookups", r"softmax|SoftMax|nll_loss|gather|scatter|index|embedding"),
    ("reductions", r"reduce"),
)
"""Kind of a kernel by its name; the first that fits."""

IDLE = {
    "waits": "the host waits for the device",
    "launches": "the host launches too slowly",
    "latency": "launched kernels begin late",
}
FEW = 0.08
"""Share of a step below which a part is no cause."""


@dataclass(frozen=True)
class Reading:
    """Figures of one step.

    Attributes:
        step_s: seconds without the profiler.
        work_s: seconds in which the device ran something.
        launches, kernels: number; copies between host and device count as kernels.
        per_block: kernels by kind, for each block and pass.
        kinds_s: seconds by kind of kernel.
        idle_s: seconds by the keys of `IDLE`.
        waits: calls of the host that wait, by name.
        launch_us: mean time between the launches of a busy host under the profiler.
    """

    step_s: float
    work_s: float
    launches: float
    kernels: float
    per_block: Mapping[str, float]
    kinds_s: Mapping[str, float]
    idle_s: Mapping[str, float]
    waits: Mapping[str, float]
    launch_us: float
    slowest_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def idle(self) -> float:
        """Share of the step in which the device does nothing."""
        return sum(self.idle_s.values()) / self.step_s

    def as_json(self) -> dict[str, Any]:
        """Figures for a result, rounded."""
        return {"idle": round(self.idle, 4), **rounded(asdict(self))}


def rounded(value: Any) -> Any:
    """Keep 5 significant digits of all numbers inside."""
    if isinstance(value, Mapping):
        return {key: rounded(one) for key, one in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def read_profile(
    events: Iterable[Mapping[str, Any]], *, step_s: float, steps: int, block_passes: int
) -> Reading:
    """Read the events of a trace.

    Args:
        step_s: seconds of a step without the profiler.
        steps: how many the trace has.
        block_passes: blocks × micro-batches of a step; a pass is forward and backward.

    Raises:
        ValueError: the trace has no kernel.
    """
    known = [one for one in events if "dur" in one]
    work = sorted((one for one in known if one.get("cat") in WORK), key=lambda one: one["ts"])
    if not work:
        raise ValueError("the trace has no kernel: profile a step on a GPU")
    calls = [one for one in known if one.get("cat") in CALLS]
    first, last = work[0]["ts"], max(end_of(one) for one in work)
    idle_us = idle_time(work, calls)
    busy_us = last - first - sum(idle_us.values())
    work_s = busy_us / steps / 1e6
    lost_s = max(0.0, step_s - work_s)
    whole_us = sum(idle_us.values())
    kinds_us: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    names_us: Counter[str] = Counter()
    for one in work:
        kind = kind_of(one["name"])
        kinds_us[kind] += one["dur"]
        counts[kind] += 1
        names_us[one["name"][:80]] += one["dur"]
    waits = Counter(one["name"] for one in calls if is_wait(one) and one["ts"] < work[-1]["ts"])
    return Reading(
        step_s=step_s,
        work_s=work_s,
        launches=sum(is_launch(one) for one in calls) / steps,
        kernels=len(work) / steps,
        per_block={kind: count / steps / block_passes for kind, count in counts.items()},
        kinds_s={kind: us / steps / 1e6 for kind, us in kinds_us.items()},
        idle_s={
            why: lost_s * (us / whole_us if whole_us else why == "launches")
            for why, us in idle_us.items()
        },
        waits={name: count / steps for name, count in waits.items()},
        launch_us=launch_interval_us(calls),
        slowest_ms={name: us / steps / 1e3 for name, us in names_us.most_common(12)},
    )


def idle_time(
    work: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Return the microseconds between kernels in which the device was idle, by cause.

    A gap before a kernel belongs to its launch as far as that had not returned. It belongs to a wait
    if the host was blocked when the device ran dry, since the host could not launch ahead.

    Args:
        work: kernels and copies in order of their begin.
    """
    launched = {one["args"]["correlation"]: end_of(one) for one in calls if is_launch(one)}
    blocked = sorted((one["ts"], end_of(one)) for one in calls if is_wait(one))
    found = dict.fromkeys(IDLE, 0.0)
    done = end_of(work[0])
    at = 0
    for one in work[1:]:
        gap = one["ts"] - done
        if gap > 0:
            returned = launched.get(one.get("args", {}).get("correlation"), one["ts"])
            of_host = min(max(returned - done, 0.0), gap)
            while at < len(blocked) and blocked[at][1] < done:
                at += 1
            drained = at < len(blocked) and blocked[at][0] < done
            found["waits" if drained else "launches"] += of_host
            found["latency"] += gap - of_host
        done = max(done, end_of(one))
    return found


def launch_interval_us(calls: Sequence[Mapping[str, Any]]) -> float:
    """Return the median time from one launch to the next; 0.0 for fewer than two."""
    begins = sorted(one["ts"] for one in calls if is_launch(one))
    apart = sorted(b - a for a, b in zip(begins, begins[1:], strict=False))
    return float(apart[len(apart) // 2]) if apart else 0.0


def kind_of(name: str) -> str:
    """Return the kind of a kernel.

    >>> kind_of("triton_poi_fused_add_0"), kind_of("Memcpy DtoD (Device -> Device)")
    ('compiled code', 'copies and casts')
    >>> kind_of("nvjet_sm90_tst_256x128"), kind_of("void at::native::vectorized_elementwise_kernel")
    ('matrix products', 'element-wise')
    """
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), OTHER)


def is_launch(call: Mapping[str, Any]) -> bool:
    """Return whether a call of the runtime starts work on the device."""
    return bool(re.search(r"Launch|MemcpyAsync|MemsetAsync|Memcpy$", call["name"]))


def is_wait(call: Mapping[str, Any]) -> bool:
    """Return whether the host is blocked in a call until the device has done something."""
    return bool(re.search(r"Synchronize|Memcpy$", call["name"]))


def end_of(event: Mapping[str, Any]) -> float:
    """Return the moment an event ends, in microseconds."""
    return float(event["ts"] + event["dur"])


def first_cause(reading: Reading) -> str:
    """Name what takes the most time of a step beside matrix products and attention.

    These two are what a step is for. If no other part takes `FEW` of the step, they are the answer.
    """
    parts = {**reading.idle_s, **reading.kinds_s}
    useful_s = sum(parts.pop(kind, 0.0) for kind in (PRODUCTS, ATTENTION))
    share = {part: seconds / reading.step_s for part, seconds in parts.items()}
    cause = max(share, key=lambda part: share[part], default="")
    if not cause or share[cause] < FEW:
        return (
            f"matrix products and attention take {useful_s / reading.step_s:.0%} of a step, "
            f"and no other part {FEW:.0%}"
        )
    spent = f"{share[cause]:.0%} of a step ({milliseconds(parts[cause])} of {milliseconds(reading.step_s)} ms)"
    if cause not in IDLE:
        many = reading.per_block.get(cause, 0.0)
        return f"{cause} take {spent}, {many:.3g} kernels a block and pass"
    details = {
        "waits": ", ".join(f"{name} {count:.3g} times" for name, count in reading.waits.items()),
        "launches": (
            f"{reading.launches:.0f} launches a step, one every {reading.launch_us:.0f} us under "
            f"the profiler, {sum(reading.per_block.values()):.3g} kernels a block and pass"
        ),
        "latency": "dependencies between streams, or kernels shorter than a launch",
    }
    return f"{IDLE[cause]}: the device idles {spent}; {details[cause]}"


def compare(ours: Reading, theirs: Reading, peer: str) -> str:
    """Name the part of a step in which ours loses the most time to a peer's."""
    mine, other = ({**one.idle_s, **one.kinds_s} for one in (ours, theirs))
    lost = {part: mine.get(part, 0.0) - other.get(part, 0.0) for part in {**mine, **other}}
    cause = max(lost, key=lambda part: lost[part])
    ratio = ours.step_s / theirs.step_s
    if lost[cause] <= 0:
        return f"{ratio:.2f} of {peer}'s step; no part takes longer"
    many, few = ours.per_block.get(cause), theirs.per_block.get(cause, 0.0)
    counted = "" if many is None else f" ({many:.3g} kernels a block and pass, {few:.3g} there)"
    named = IDLE.get(cause, cause)
    return (
        f"{ratio:.2f} of {peer}'s step; the most is lost in: {named}{counted}, "
        f"{milliseconds(lost[cause])} ms a step"
    )


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds with three digits."""
    return f"{seconds * 1e3:.3g}"
