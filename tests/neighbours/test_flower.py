"""A Flower client on two ranks: the numbers of its own loop. Flower itself runs in `make proof`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shoal.base.errors import ClusterError, ConfigError
from shoal.neighbours import flower


class StandInApp:
    """What of Flower's ClientApp the facade uses: it registers a train function, and calls it."""

    def train(self) -> Callable[[Any], Any]:
        def register(function: Any) -> Any:
            self.function = function
            return function

        return register

    def __call__(self, message: Any, context: Any) -> Any:
        return self.function(message, context)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An app made by the changed import, without Flower."""
    module = ModuleType("flwr.clientapp")
    module.ClientApp = StandInApp  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flwr", ModuleType("flwr"))
    monkeypatch.setitem(sys.modules, "flwr.clientapp", module)
    flower._make_client_app.cache_clear()
    yield flower.ClientApp()
    flower._make_client_app.cache_clear()


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def loader(count: int = 26) -> DataLoader[Any]:
    """Batches of 8 in a drawn order; the last one is short."""
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(count, 5, generator=drawn, dtype=torch.float64)
    y = torch.randint(0, 3, (count,), generator=drawn)
    order = torch.Generator().manual_seed(2)
    return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=order)


def plain(net: nn.Module, batches: Any, epochs: int, lr: float) -> float:
    """The quickstart's loop."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    losses = []
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return sum(losses) / len(losses)


def handle(message: Any, context: Any) -> Any:
    """Train the message's weights; the reply has them, and the loss."""
    net = build()
    net.load_state_dict(message)
    batches: Any = loader()
    if context.as_dicts:
        batches = [{"label": y, "image": x} for x, y in batches]
    loss = flower.train(net, batches, 2, 0.1, "cpu")
    return net.state_dict(), loss, os.environ.get("WORLD_SIZE", "1")


def test_two_messages_on_two_ranks_have_the_numbers_of_the_plain_loop(client: Any) -> None:
    client.train()(handle)
    before = dict(os.environ)
    weights = build().state_dict()
    for layout, as_dicts in (("ddp", False), ("zero1", True)):
        settings = {"shoal-processes": 2, "shoal-layout": layout}
        context = SimpleNamespace(run_config=settings, as_dicts=as_dicts)
        found, loss, size = client({n: t.clone() for n, t in weights.items()}, context)
        wanted = build()
        wanted.load_state_dict(weights)
        batches = list(loader()) if as_dicts else loader()
        assert loss == pytest.approx(plain(wanted, batches, 2, 0.1), rel=1e-12)
        for name, tensor in wanted.state_dict().items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-13)
        assert dict(os.environ) == before
        weights = found
    assert size == "2"


def test_one_process_needs_no_fork(client: Any) -> None:
    client.train()(handle)
    context = SimpleNamespace(run_config={"shoal-processes": 1}, as_dicts=False)
    _, _, size = client(build().state_dict(), context)
    assert size == "1"


def test_a_rank_that_fails_ends_the_message(client: Any) -> None:
    """Its own error is on standard error; no fork is left."""

    def fails(message: Any, context: Any) -> Any:
        if os.environ["RANK"] != "0":
            raise SystemExit(3)

    client.train()(fails)
    before = set(psutil.Process().children())  # other tests' servers
    with pytest.raises(ClusterError, match="rank 1 of this client: exit status 1; its error is"):
        client(None, SimpleNamespace(run_config={"shoal-processes": 2}))
    assert set(psutil.Process().children()) <= before


def test_one_line_for_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="shoal-layout = tp: each rank takes a part .* try: auto"):
        flower.read_settings({"shoal-layout": "tp"})
    with pytest.raises(ConfigError, match="shoal-processes = -1: at least 1; try: "):
        flower.read_settings({"shoal-processes": -1})
    with pytest.raises(ConfigError, match="a batch of list with 1 tensors; try: "):
        flower.read_batch([torch.zeros(2)])
    world: Any = SimpleNamespace(size=2, rank=1)
    with pytest.raises(ConfigError, match="a batch of 1 for 2 ranks; try: drop_last=True"):
        list(flower.deal_rows(loader(25), world))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="CUDA has begun .* try: shoal-processes = 1"):
        flower.fork_ranks(2, lambda: None)
