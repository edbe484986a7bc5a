"""One island of one program of `islands_utilisation.py`: inner steps are planned sleeps.

Every program trains the same 20 matrices on the same schedule and, apart from sending, works within
the planned time of its steps, so that what takes longer than planned is waiting:

    ddp, powersgd    gradients every step; forward a third of a step, backward two thirds, layer by
                     layer, so that buckets travel beside the backward of earlier layers
    shoal_…          `fabric.plane` and the methods of `islands/`, driven as a run drives them
    torchft_…        its Manager and DiLoCo, one replica group of one process per island; run by an
                     interpreter that has torchft, see `islands_utilisation.py`

    python islands_members.py '{"program": …, "index": …}'      writes a JSON object to job["out"]

Runs inside a network namespace and reads its interface's counters. Shoal's programs import Shoal,
torchft's import torchft; the others need torch alone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests" / "worlds"), str(HERE.parent / "src")]
from netns import counters, settings  # noqa: E402

LAYERS, OUTER_LR, OUTER_MOMENTUM = 20, 0.7, 0.9
DEADLINE_S = 900.0
Job = dict[str, Any]


class Clock:
    """Planned steps, and what a measured window of them took and sent."""

    def __init__(self, job: Job) -> None:
        self.step_s = float(job["step_s"])
        self.found: dict[str, Any] = {}

    def sleep_until(self, at_s: float) -> None:
        """Sleep to a moment; not at all if it has passed."""
        time.sleep(max(0.0, at_s - time.monotonic()))

    def begin(self) -> None:
        """The window begins."""
        self._bytes, self._began_s = counters(), time.monotonic()

    def end(self, steps: int) -> None:
        """The window ends, `steps` planned steps later."""
        wall_s, (received, sent) = time.monotonic() - self._began_s, counters()
        self.found = {
            "steps": steps,
            "wall_s": wall_s,
            "utilisation": steps * self.step_s / wall_s,
            "sent_bytes": sent - self._bytes[1],
            "received_bytes": received - self._bytes[0],
            "interface": settings(),
        }


def matrices(job: Job) -> dict[str, nn.Parameter]:
    """The weights, the same on every island."""
    side = round((job["parameters"] / LAYERS) ** 0.5)
    torch.manual_seed(0)
    return {f"blocks.{k}.weight": nn.Parameter(torch.randn(side, side)) for k in range(LAYERS)}


class _Slept(torch.autograd.Function):
    """A layer whose forward and backward end at planned moments."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Planned) -> torch.Tensor:
        ctx.layer = layer
        layer.clock.sleep_until(layer.began_s[0] + layer.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        layer = ctx.layer
        layer.clock.sleep_until(layer.began_s[0] + layer.backward_s)
        return gradient, layer.gradient, None


class Planned(nn.Module):
    """Layer k of n: forward done after (k+1)/3n of a step, backward after 1/3 + 2(n−k)/3n."""

    def __init__(
        self, weight: nn.Parameter, place: int, count: int, clock: Clock, began_s: list[float]
    ) -> None:
        super().__init__()
        self.weight, self.clock, self.began_s = weight, clock, began_s
        self.forward_s = clock.step_s * (place + 1) / (3 * count)
        self.backward_s = clock.step_s * (1 / 3 + 2 * (count - place) / (3 * count))
        self.gradient = torch.randn_like(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same numbers, later."""
        return _Slept.apply(x, self.weight, self)  # type: ignore[no-any-return]


def data_parallel(job: Job, clock: Clock) -> None:
    """torch's DDP; with job["rank"] its PowerSGD hook of that rank."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{job['addresses'][0]}:{job['port']}",
        rank=job["index"],
        world_size=job["count"],
        timeout=timedelta(seconds=DEADLINE_S),
    )
    began_s = [0.0]
    weights = list(matrices(job).values())
    layers = [Planned(w, k, len(weights), clock, began_s) for k, w in enumerate(weights)]
    # PowerSGD's hook sums a second time when the first sum arrives. With several buckets that is in
    # another order on every rank, and gloo pairs messages by their order: it waits for ever. So it
    # gets one bucket, of few bytes once compressed.
    buckets = {"bucket_cap_mb": 1000} if job.get("rank") else {}
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*layers), gradient_as_bucket_view=True, **buckets
    )
    warm_up = 1
    if job.get("rank"):
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        # It compresses from its third step on; the first two are all-reduces.
        warm_up = 3
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=job["rank"], start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(warm_up + job["steps"]):
        if step == warm_up:
            dist.barrier()
            clock.begin()
        began_s[0] = time.monotonic()
        model(torch.zeros(1, requires_grad=True)).sum().backward()
        clock.sleep_until(began_s[0] + clock.step_s)
        model.zero_grad(set_to_none=True)
    clock.end(job["steps"])
    dist.barrier()
    dist.destroy_process_group()


def shoal_islands(job: Job, clock: Clock) -> None:
    """A method of `[islands]` over the plane, one process per island."""
    from shoal.base.layouts.island_options import IslandsPolicy
    from shoal.fabric.compressed.codecs import ErrorFeedback, find_codec
    from shoal.fabric.islands.inter_island_group import connect_islands, join_island_store
    from shoal.islands.methods import find_method
    from shoal.trainer.islands.island_join import FEEDS_BACK

    policy = IslandsPolicy(count=job["count"], period=job["period"], **job["policy"]).resolved()
    at = f"{job['addresses'][0]}:{job['port']}"
    store = join_island_store(at, job["index"], job["count"], deadline_s=60)
    plane = connect_islands(
        store, "0", job["index"], job["count"], connections=policy.connections,
        host=job["addresses"][0], deadline_s=60,
    )  # fmt: skip
    method, codec = find_method(policy), find_codec(policy.codec, torch.float32)
    feedback = ErrorFeedback(method.keeps) if policy.codec in FEEDS_BACK else None
    local = {name: weight.data for name, weight in matrices(job).items()}
    outer = method.open(local)
    fragments = method.fragments({name: part.nbytes for name, part in local.items()})
    everyone = [True] * job["count"]

    def exchange(message: dict[str, torch.Tensor], tag: str) -> None:
        flat = torch.cat([part.reshape(-1) for part in message.values()])
        arrived = plane.start_compressed_all_reduce(
            flat, codec, feedback=feedback, tag=tag, deadline_s=DEADLINE_S
        )
        statistics = json.dumps([arrived.finite, arrived.gram]).encode()
        plane.gather(statistics, deadline_s=DEADLINE_S)
        weights, divisor = method.message_weights([1.0] * job["count"], [], everyone)
        mean = arrived.finish(weights, divisor, deadline_s=DEADLINE_S)
        pieces = mean.split([part.numel() for part in message.values()])
        parts = {
            name: piece.view(part.shape)
            for (name, part), piece in zip(message.items(), pieces, strict=True)
        }
        finite = method.step(outer, parts)
        votes = plane.gather(f"{finite} {outer.digest()}".encode(), deadline_s=DEADLINE_S)
        if not finite or len(set(votes)) != 1:
            raise RuntimeError(f"the islands do not agree: {votes}")
        outer.commit()

    def one_round() -> None:
        done, thread = 0, Background()
        for moment in method.schedule_fragments(policy.period):
            steps(clock, moment.send_after - done, local)
            names = fragments[moment.fragment]
            overlaps = moment.apply_after > moment.send_after
            sent = method.sent(outer, names, local) if overlaps else None
            message = method.message(outer, names, sent or local)
            thread.start(lambda m=message, tag=f"{moment.fragment}": exchange(m, tag))
            steps(clock, moment.apply_after - moment.send_after, local)
            thread.result()
            method.apply_merge(outer, names, local, refused=False, sent=sent)
            done = moment.apply_after

    one_round()
    plane.gather(b"", deadline_s=DEADLINE_S)
    before = plane.sent_bytes
    clock.begin()
    for _ in range(job["rounds"]):
        one_round()
    clock.end(job["rounds"] * policy.period)
    clock.found["coded_bytes"] = plane.sent_bytes - before
    clock.found["policy"] = vars(policy)
    plane.gather(b"", deadline_s=DEADLINE_S)
    plane.close()


class Background:
    """One call at a time in a thread; its failure is raised where its end is awaited."""

    def start(self, work: Callable[[], None]) -> None:
        """Begin."""
        self._failure: BaseException | None = None

        def run() -> None:
            try:
                work()
            except BaseException as failure:
                self._failure = failure

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def result(self) -> None:
        """Wait for the end."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure


def steps(clock: Clock, count: int, local: dict[str, torch.Tensor]) -> None:
    """Inner steps: the planned time each; the last moves the weights a little within its time."""
    for step in range(count):
        began_s = time.monotonic()
        if step == count - 1:
            for part in local.values():
                part.mul_(0.999)
        clock.sleep_until(began_s + clock.step_s)


def torchft_diloco(job: Job, clock: Clock) -> None:
    """torchft's DiLoCo, with job["fragments"] and job["delay"] as its streaming form."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    address, long = job["addresses"][job["index"]], timedelta(seconds=DEADLINE_S)
    lighthouse = None
    if job["index"] == 0:
        lighthouse = LighthouseServer(
            bind=f"{address}:{job['port']}", min_replicas=job["count"], join_timeout_ms=60_000
        )
    store = dist.TCPStore(address, job["port"] + 1, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=long),
        load_state_dict=lambda _: None,
        state_dict=dict,
        min_replica_size=job["count"],
        use_async_quorum=False,
        timeout=long,
        quorum_timeout=long,
        connect_timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=f"http://{job['addresses'][0]}:{job['port']}",
        replica_id=f"island_{job['index']}",
        hostname=address,
        init_sync=False,
    )
    weights = matrices(job)
    local = {name: weight.data for name, weight in weights.items()}
    names, count = list(weights), job["fragments"]
    pieces = [
        nn.ParameterDict({str(k): weights[name] for k, name in enumerate(names[p::count])})
        for p in range(count)
    ]
    hand = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)  # its step is what DiLoCo hears
    outer = [
        torch.optim.SGD(p.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
        for p in pieces
    ]
    with DiLoCo(
        manager,
        pieces,
        hand,
        outer,
        sync_every=job["period"],
        fragment_sync_delay=job["delay"],
        fragment_update_alpha=0.5 if job["delay"] else 0.0,
    ):
        for round_number in range(1 + job["rounds"]):
            if round_number == 1:
                clock.begin()
            for _ in range(job["period"]):
                steps(clock, 1, local)
                hand.step()
        clock.end(job["rounds"] * job["period"])
    clock.found["committed"] = manager.current_step()
    if clock.found["committed"] != (1 + job["rounds"]) * count:
        raise RuntimeError(f"torchft committed {clock.found['committed']} fragments")
    time.sleep(2.0)  # the others read the last vote from this one's server
    manager.shutdown(wait=False)
    if lighthouse is not None:
        lighthouse.shutdown()


PROGRAMS: dict[str, Callable[[Job, Clock], None]] = {
    "data_parallel": data_parallel,
    "shoal_islands": shoal_islands,
    "torchft_diloco": torchft_diloco,
}


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    clock = Clock(job)
    try:
        PROGRAMS[job["program"]](job, clock)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # not where threads keep a failed program alive
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    Path(job["out"]).write_text(json.dumps({**clock.found, "versions": versions}))
    sys.stdout.flush()
    os._exit(0)  # rivals' threads may not end


if __name__ == "__main__":
    main()
