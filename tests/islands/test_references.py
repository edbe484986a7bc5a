"""Methods against small references written out by hand, number by number, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from shoal.base.layouts.island_options import METHODS, IslandsPolicy
from shoal.islands.method import MergeMethod
from shoal.islands.methods import find_method
from shoal.islands.methods.noloco import draw_pairs, pair_distance
from shoal.islands.outer_optimizer import OuterState

Weights = dict[str, Tensor]


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def method_of(name: str, count: int, **keys) -> MergeMethod:
    codec = keys.pop("codec", "none")
    data = "own" if name == "scaffold" else "shared"
    return find_method(IslandsPolicy(name, count=count, codec=codec, data=data, **keys))


class Fleet:
    """Islands of a run, one after another in this process; each begins at the same weights."""

    def __init__(self, method: MergeMethod, first: Weights, count: int) -> None:
        self.method = method
        self.local = [{name: w.clone() for name, w in first.items()} for _ in range(count)]
        self.outers = [method.open(first) for _ in range(count)]

    def merge(
        self, tokens: Sequence[float], round_number: int = 0, names: tuple[str, ...] = ()
    ) -> None:
        method, count = self.method, len(self.outers)
        names = names or tuple(self.local[0])
        acting = [outer.at(round_number) for outer in self.outers]
        sent = [method.message(a, names, w) for a, w in zip(acting, self.local, strict=True)]
        for index in range(count):
            partners = method.partners(round_number, index, count)
            norms = [
                math.sqrt(sum(float((p * p).sum()) for p in sent[j].values())) for j in partners
            ]
            admitted = [True] * len(partners)
            weights, divisor = method.message_weights(
                [tokens[j] for j in partners], norms, admitted
            )
            mean = {}
            for name in names:
                total = torch.zeros_like(sent[index][name])
                for weight, j in zip(weights, partners, strict=True):
                    total += weight * sent[j][name]
                mean[name] = total / divisor
            assert method.step(acting[index], mean)
        for outer in acting:
            outer.commit()
        for outer, local in zip(acting, self.local, strict=True):
            method.apply_merge(outer, names, local, refused=False)

    def digests(self) -> list[str]:
        return [outer.digest() for outer in self.outers]


def one_vector(name: str, count: int, elements: int = 5, **keys) -> tuple[Fleet, list[float]]:
    first = numbers(0, elements)
    return Fleet(method_of(name, count, **keys), {"w": first}, count), first.tolist()


def wander(fleet: Fleet, seed: int) -> list[list[float]]:
    """Every island changes its weights; gives what they are then."""
    for index, local in enumerate(fleet.local):
        for place, weight in enumerate(local.values()):
            weight.add_(0.1 * numbers(1000 * seed + 10 * index + place, *weight.shape))
    return [local["w"].tolist() for local in fleet.local]


def close(found: Tensor, wanted: Sequence[float]) -> None:
    torch.testing.assert_close(
        found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-13, atol=1e-13
    )


def weighted_mean(values: Sequence[float], by: Sequence[float]) -> float:
    return sum(n * value for n, value in zip(by, values, strict=True)) / sum(by)


@pytest.mark.parametrize("name", METHODS)
def test_a_step_downhill_stays_one(name: str) -> None:
    """loss = ‖w‖²/2, and both islands went from W to 0.9·W; new − old would climb."""
    fleet, w = one_vector(name, 2, elements=40)
    before = torch.tensor(w, dtype=torch.float64).norm()
    for local in fleet.local:
        local["w"].mul_(0.9)
    fleet.merge([1, 1])
    assert fleet.outers[0].weights["w"].norm() < before
    assert fleet.local[1]["w"].norm() < before


def test_diloco() -> None:
    fleet, w = one_vector("diloco", 3)
    u = [0.0] * len(w)
    for step in range(4):
        own, tokens = wander(fleet, step + 1), [60, 240, 100 + step]
        fleet.merge(tokens, step)
        for k in range(len(w)):
            d = weighted_mean([w[k] - one[k] for one in own], tokens)
            u[k] = 0.9 * u[k] + d
            w[k] = w[k] - 0.7 * (d + 0.9 * u[k])
        for local in fleet.local:
            close(local["w"], w)
        assert len(set(fleet.digests())) == 1


@pytest.mark.parametrize("name", ["local-sgd", "fedavg", "fedprox", "branch-train-merge"])
def test_averaging_methods_average_by_tokens(name: str) -> None:
    fleet, w = one_vector(name, 3, elements=1000)
    tokens = [60, 240, 100]
    own = wander(fleet, 1)
    fleet.merge(tokens)
    mean = [weighted_mean([one[k] for one in own], tokens) for k in range(len(w))]
    found = fleet.local[0]["w"]
    wanted = torch.tensor(mean, dtype=torch.float64)
    assert (found - wanted).norm() <= 1e-15 * wanted.norm()


def test_branches_that_are_equal_merge_into_themselves() -> None:
    fleet, w = one_vector("branch-train-merge", 3)
    for local in fleet.local:
        local["w"].mul_(1.5)
    fleet.merge([1, 2, 3])
    close(fleet.local[0]["w"], [1.5 * x for x in w])


def test_local_sgd_every_step_is_data_parallel_training() -> None:
    """The gradient of the batch is the mean over its samples, wherever they are."""
    fleet, w = one_vector("local-sgd", 2, period=1)
    targets = [numbers(7, 3, 5), numbers(8, 6, 5)]  # 3 and 6 samples
    whole = torch.cat(targets)
    want = torch.tensor(w, dtype=torch.float64)
    for step in range(5):
        for local, samples in zip(fleet.local, targets, strict=True):
            local["w"].sub_(0.1 * (local["w"] - samples).mean(0))
        fleet.merge([len(samples) for samples in targets], step)
        want = want - 0.1 * (want - whole).mean(0)
    torch.testing.assert_close(fleet.local[1]["w"], want, rtol=1e-14, atol=1e-14)


def adagrad(v: float, d: float) -> float:
    return v + d * d


def yogi(v: float, d: float) -> float:
    sign = (v > d * d) - (v < d * d)
    return v - 0.01 * d * d * sign


def adam(v: float, d: float) -> float:
    return 0.99 * v + 0.01 * d * d


@pytest.mark.parametrize("server", [adagrad, yogi, adam])
def test_fedopt(server: Callable[[float, float], float]) -> None:
    """As the paper writes it: Δ is new minus old, and is added."""
    fleet, x = one_vector("fedopt", 2, server=server.__name__)
    m, v = [0.0] * len(x), [1e-6] * len(x)
    for step in range(5):
        own = wander(fleet, step + 1)
        fleet.merge([10, 30], step)
        for k in range(len(x)):
            delta = weighted_mean([one[k] - x[k] for one in own], [10, 30])
            m[k] = 0.9 * m[k] + 0.1 * delta
            v[k] = server(v[k], delta)
            x[k] += 0.1 * m[k] / (math.sqrt(v[k]) + 1e-3)
        close(fleet.local[0]["w"], x)
    assert len(set(fleet.digests())) == 1


def test_yogi_shrinks_slowly_and_adagrad_never() -> None:
    outers = {}
    for server in ("adagrad", "yogi", "adam"):
        method = method_of("fedopt", 2, server=server)
        outers[server] = method.open({"w": torch.zeros(1, dtype=torch.float64)})
        for change in (1.0, *[1e-4] * 50):
            method.step(outers[server], {"w": torch.tensor([change], dtype=torch.float64)})
            outers[server].commit()
    left = {name: float(outer.tensors()["w.square"]) for name, outer in outers.items()}
    assert left["adagrad"] > 1
    assert 0.0099 < left["yogi"] < 0.0101  # grew by a hundredth of 1², forgot next to nothing since
    assert left["adam"] < 0.0062  # 0.99⁵⁰ of that


def test_fedprox_adds_the_pull_to_the_gradient() -> None:
    """One inner step of loss ‖w − t‖²/2 + μ/2·‖w − W‖², its gradient taken by hand."""
    method = method_of("fedprox", 2, proximal=0.3)
    start, target = numbers(1, 4), numbers(2, 4)
    outer = method.open({"w": start, "frozen": start})
    own = nn.Parameter(start.clone())
    frozen = nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([own], lr=0.5)
    want = start.tolist()
    for _ in range(3):
        own.grad = (own.detach() - target).clone()
        method.before_update(outer, {"w": own, "frozen": frozen, "elsewhere": nn.Parameter(start)})
        optimizer.step()
        for k in range(4):
            gradient = (want[k] - float(target[k])) + 0.3 * (want[k] - float(start[k]))
            want[k] -= 0.5 * gradient
    close(own.detach(), want)
    assert frozen.grad is None


def test_streaming_with_overlap_and_mixing() -> None:
    """Two blocks, H = 4, τ = 1, α = 0.25, quadratic losses; the reference walks step by step."""
    first = {"blocks.0.w": numbers(0, 3), "blocks.1.w": numbers(1, 3)}
    method = method_of("streaming-diloco", 2, period=4, fragments=2, overlap=1, mixing=0.25)
    fleet = Fleet(method, first, 2)
    fragments = method.fragments({name: 24 for name in first})
    targets = [{name: numbers(10 + k, 3) for name in first} for k in range(2)]

    W = {name: w.tolist() for name, w in first.items()}
    u = {name: [0.0] * 3 for name in first}
    w = [{name: list(W[name]) for name in first} for _ in range(2)]
    for _ in range(3):
        waiting: dict[int, tuple] = {}
        for t in range(1, 5):
            for island in range(2):
                for name, weight in fleet.local[island].items():
                    weight.sub_(0.2 * (weight - targets[island][name]))
                for name in first:
                    for k in range(3):
                        w[island][name][k] -= 0.2 * (
                            w[island][name][k] - float(targets[island][name][k])
                        )
            for moment in method.schedule_fragments(4):
                if moment.send_after == t:
                    names = fragments[moment.fragment]
                    waiting[moment.fragment] = tuple(
                        method.message(fleet.outers[0], names, local) for local in fleet.local
                    )
                    left = [method.sent(fleet.outers[0], names, local) for local in fleet.local]
                if moment.apply_after == t:
                    one, two = waiting.pop(moment.fragment)
                    for outer, local, own in zip(fleet.outers, fleet.local, left, strict=True):
                        method.step(outer, {name: (one[name] + two[name]) / 2 for name in one})
                        outer.commit()
                        method.apply_merge(outer, tuple(one), local, refused=False, sent=own)
            if t in {1, 3}:  # fragment 0 leaves after 1, fragment 1 after 3
                name = f"blocks.{t // 2}.w"
                then = [list(w[island][name]) for island in range(2)]
                sent = [(W[name][k] - then[0][k], W[name][k] - then[1][k]) for k in range(3)]
            if t in {2, 4}:
                name = f"blocks.{t // 2 - 1}.w"
                for k in range(3):
                    d = sum(sent[k]) / 2
                    u[name][k] = 0.9 * u[name][k] + d
                    W[name][k] -= 0.7 * (d + 0.9 * u[name][k])
                    for island in range(2):
                        w[island][name][k] += 0.75 * (W[name][k] - then[island][k])
        for island in range(2):
            for name in first:
                close(fleet.local[island][name], w[island][name])
                close(fleet.outers[island].weights[name], W[name])
    assert len(set(fleet.digests())) == 1


def test_sparse_loco_shortens_to_the_median_and_has_no_momentum() -> None:
    fleet, w = one_vector("sparse-loco", 3)
    for step in range(2):
        own = wander(fleet, step + 1)
        own[2] = [w[k] + 40 * (own[2][k] - w[k]) for k in range(len(w))]  # far too long
        fleet.local[2]["w"].copy_(torch.tensor(own[2], dtype=torch.float64))
        tokens = [10, 20, 30]
        fleet.merge(tokens, step)
        d = [[w[k] - one[k] for k in range(len(w))] for one in own]
        norms = [math.sqrt(sum(x * x for x in one)) for one in d]
        middle = sorted(norms)[1]
        for k in range(len(w)):
            parts = [tokens[i] * min(1, middle / norms[i]) * d[i][k] for i in range(3)]
            w[k] -= sum(parts) / 60
        close(fleet.local[0]["w"], w)


def test_noloco() -> None:
    count = 4
    fleet, first = one_vector("noloco", count)
    size = len(first)
    phi = [list(first) for _ in range(count)]
    delta = [[0.0] * size for _ in range(count)]
    for step in range(6):
        own = wander(fleet, step + 1)
        fleet.merge([1, 2, 3, 4], step)  # tokens do not weigh here
        old = [list(one) for one in phi]
        for i in range(count):
            pair = next(p for p in draw_pairs(0, step, count) if i in p)
            for k in range(size):
                mean_d = sum(old[j][k] - own[j][k] for j in pair) / 2
                mean_phi = sum(old[j][k] for j in pair) / 2
                delta[i][k] = 0.5 * delta[i][k] - 0.7 * mean_d - (old[i][k] - mean_phi)
                phi[i][k] = old[i][k] + delta[i][k]
        for i in range(count):
            close(fleet.local[i]["w"], phi[i])
    assert not torch.equal(fleet.local[0]["w"], fleet.local[1]["w"])
    assert len(set(fleet.digests())) == 1, "what all hold alike: the names"


def test_noloco_keeps_the_mean_and_draws_the_islands_together() -> None:
    """Nothing is learnt: the mean over all islands stays, their distances shrink."""
    count = 5  # odd: one goes alone each round
    method = method_of("noloco", count)
    starts = [numbers(k, 100) for k in range(count)]
    fleet = Fleet(method, {"w": starts[0]}, count)
    for outer, local, start in zip(fleet.outers, fleet.local, starts, strict=True):
        outer.load({"w": start})
        local["w"].copy_(start)
    mean = sum(starts) / count
    apart = [sum(float((local["w"] - mean).norm()) for local in fleet.local)]
    for step in range(40):
        fleet.merge([1] * count, step)
        now = sum(local["w"] for local in fleet.local) / count
        torch.testing.assert_close(now, mean, rtol=0, atol=1e-13)
        apart.append(sum(float((local["w"] - mean).norm()) for local in fleet.local))
    assert apart[-1] < 1e-2 * apart[0]


def test_noloco_reports_how_far_a_pair_is_apart() -> None:
    method = method_of("noloco", 2)
    one, two = numbers(1, 50), numbers(2, 50)
    sent = []
    for weight in (one, two):
        outer = method.open({"w": weight})
        sent.append(method.message(outer, ("w",), {"w": weight})["w"])
    gram = [[float(a @ b) for b in sent] for a in sent]
    mean = (one + two) / 2
    wanted = math.sqrt(float((one - mean).square().sum() + (two - mean).square().sum()) / 2)
    assert pair_distance(gram) == pytest.approx(wanted / float(mean.norm()), rel=1e-12)
    assert pair_distance([[2.0, 2.0], [2.0, 2.0]]) == 0
    assert math.isnan(pair_distance([[math.nan, 1.0], [1.0, 1.0]]))


def test_two_tiers() -> None:
    """Regions {0, 1} and {2, 3}, far in every third round; momenta apart."""
    fleet, first = one_vector("diloco", 4, regions=2, far_period=3)
    size, tokens = len(first), [10, 30, 20, 50]
    near, u = [list(first) for _ in range(2)], [[0.0] * size for _ in range(2)]
    far, u_far = list(first), [0.0] * size
    for step in range(7):
        own = wander(fleet, step + 1)
        fleet.merge(tokens, step)
        if step in {2, 5}:
            for k in range(size):
                d = weighted_mean([far[k] - one[k] for one in own], tokens)
                u_far[k] = 0.9 * u_far[k] + d
                far[k] -= 0.7 * (d + 0.9 * u_far[k])
            near, u = [list(far) for _ in range(2)], [[0.0] * size for _ in range(2)]
        else:
            for r in range(2):
                for k in range(size):
                    both = [near[r][k] - one[k] for one in own[2 * r : 2 * r + 2]]
                    d = weighted_mean(both, tokens[2 * r : 2 * r + 2])
                    u[r][k] = 0.9 * u[r][k] + d
                    near[r][k] -= 0.7 * (d + 0.9 * u[r][k])
        for island in range(4):
            close(fleet.local[island]["w"], near[island // 2])
        digests = fleet.digests()
        assert digests[0] == digests[1]
        assert digests[2] == digests[3]
        assert (digests[0] == digests[2]) == (step in {2, 5})


def test_one_island_is_an_outer_optimizer_around_an_ordinary_run() -> None:
    fleet, w = one_vector("diloco", 1)
    own = wander(fleet, 1)
    fleet.merge([100])
    close(fleet.local[0]["w"], [a - 1.33 * (a - b) for a, b in zip(w, own[0], strict=True)])


def test_an_outer_of_another_optimizer_is_torchs_own() -> None:
    fleet, w = one_vector("diloco", 2, outer="adagrad", outer_lr=0.1)
    plain = nn.Parameter(torch.tensor(w, dtype=torch.float64))
    optimizer = torch.optim.Adagrad([plain], lr=0.1)
    for step in range(3):
        before = fleet.outers[0].weights["w"]
        own = wander(fleet, step + 1)
        fleet.merge([1, 1], step)
        plain.grad = sum(before - torch.tensor(one, dtype=torch.float64) for one in own) / 2
        optimizer.step()
        torch.testing.assert_close(fleet.local[0]["w"], plain.detach(), rtol=1e-13, atol=1e-13)


def test_an_outer_keeps_to_its_own_copy() -> None:
    local = {"w": torch.zeros(3)}
    outer: OuterState = method_of("diloco", 2).open(local)
    local["w"].fill_(7)
    assert outer.weights["w"].eq(0).all()
