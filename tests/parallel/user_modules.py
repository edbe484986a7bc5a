"""Modules as users write them, each with a function that builds it and one that makes its inputs.

Weights are drawn and then perturbed, so that no bias is zero and no gain is one; everything is
float64. `call(module, inputs)` is how the model is called; `tensors(outputs)` what a loss sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, HIDDEN, HEADS, LAYERS, SEQUENCE = 31, 16, 4, 4, 6


def one_argument(module: nn.Module, inputs: Any) -> Any:
    return module(inputs)


def by_name(module: nn.Module, inputs: Any) -> Any:
    return module(**inputs)


@dataclass(frozen=True)
class Example:
    """build() → module · inputs(batch) → what `call` gives it · blocks: names of its trunk."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    blocks: tuple[str, ...]
    call: Callable[[nn.Module, Any], Any] = one_argument


def made(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The module in float64, its weights perturbed, in training mode."""
    torch.manual_seed(seed)
    module = build().double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return module.train()


def tokens(batch: int, sequence: int = SEQUENCE) -> Tensor:
    draw = torch.Generator().manual_seed(100 + batch)
    return torch.randint(VOCABULARY, (batch, sequence), generator=draw)


def numbers(*shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(200 + shape[0])
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


class SelfAttention(nn.Module):
    """One projection for q, k and v; `interleaved_actions`: each head's q, k, v lie side by side."""

    def __init__(self, interleaved: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.interleaved = interleaved

    def forward(self, x: Tensor, causal: bool = True) -> Tensor:
        batch, sequence, _ = x.shape
        if self.interleaved:
            packed = self.qkv(x).view(batch, sequence, HEADS, 3, HIDDEN // HEADS)
            q, k, v = packed.unbind(3)
        else:
            q, k, v = (p.view(batch, sequence, HEADS, -1) for p in self.qkv(x).chunk(3, -1))
        q, k, v = (p.transpose(1, 2) for p in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(y.transpose(1, 2).reshape(batch, sequence, HIDDEN))


class Layer(nn.Module):
    def __init__(self, interleaved: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = SelfAttention(interleaved)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A small GPT with positions as a bare parameter of the root, added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Parameter(torch.randn(2 * SEQUENCE, HIDDEN) * 0.02)
        self.layers = nn.ModuleList(Layer(interleaved=True) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        x += self.positions[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Nested(nn.Module):
    """Everything in a nested ModuleDict; the head is the embedding's table, used by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {
                "input": nn.ModuleDict({"table": nn.Embedding(VOCABULARY, HIDDEN)}),
                "body": nn.ModuleDict({f"level_{k}": Layer() for k in range(LAYERS)}),
                "output": nn.ModuleDict({"norm": nn.LayerNorm(HIDDEN)}),
            }
        )

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        table = self.parts["input"]["table"]
        x = table(ids)
        for level in self.parts["body"].values():
            x = level(x)
        return {"logits": F.linear(self.parts["output"]["norm"](x), table.weight)}


class Up(nn.Module):
    """A layer that also reads what a layer on the way down gave."""

    def __init__(self) -> None:
        super().__init__()
        self.join = nn.Linear(2 * HIDDEN, HIDDEN)
        self.layer = Layer()

    def forward(self, x: Tensor, *, skip: Tensor) -> Tensor:
        return self.layer(self.join(torch.cat([x, skip], -1)))


class UNet(nn.Module):
    """Down and up again, with skips; not all levels hand theirs over unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, HIDDEN)
        self.down = nn.ModuleList(Layer() for _ in range(3))
        self.up = nn.ModuleList(Up() for _ in range(3))
        self.leave = nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        skips = []
        for layer in self.down:
            skips.append(x)
            x = layer(x)
        for place, layer in enumerate(self.up):
            skip = skips.pop()
            x = layer(x, skip=skip.tanh() if place == 0 else skip)
        return self.leave(x)


class Attributes(nn.Module):
    """Blocks as attributes, beside a bare table, as research code has them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.block0, self.block1, self.block2, self.block3 = (Layer() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.block1(self.block0(self.tokens(ids)))
        return self.head(self.block3(self.block2(x)))


class Stem(nn.Module):
    """Two layers before the blocks, as Whisper's convolutions: the second's backward reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.leave = nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(F.gelu(self.first(x)))
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


class Mix(nn.Module):
    """A block of any width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stage(nn.Module):
    """Blocks of one width, and a layer to the next one's."""

    def __init__(self, width: int, after: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mix(width) for _ in range(2))
        self.wider = nn.Linear(width, after)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.wider(x)


class Stages(nn.Module):
    """Stages of unequal width that hold the blocks, as Swin's and ConvNeXt's do."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, 8)
        self.stages = nn.ModuleList(
            Stage(*ends) for ends in ((8, 12), (12, 16), (16, 20), (20, 24))
        )
        self.leave = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for stage in self.stages:
            x = stage(x)
        return self.leave(x)


class Carried(nn.Module):
    """A block in a tuple's hands: gives back what it got, its balance loss, an integer, a None."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = Layer(), nn.Linear(HIDDEN, 3)

    def forward(
        self, state: tuple[Tensor, Tensor | None, Tensor]
    ) -> tuple[tuple[Tensor, Tensor | None, Tensor], Tensor, None]:
        x, padding, count = state
        probabilities = self.gate(x).softmax(-1)
        balance = (probabilities.mean((0, 1)) ** 2).sum()
        if padding is not None:
            x = x.masked_fill(padding[..., None], 0.0)
        return (self.layer(x), padding, count + 1), balance, None


@dataclass
class Answer:
    """What the model with an auxiliary loss returns: a dataclass that torch knows nothing of."""

    logits: Tensor
    balance: Tensor
    calls: Tensor


class TupleBlocks(nn.Module):
    """Blocks that hand on a tuple and each give an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, HIDDEN)
        self.chain = nn.ModuleList(Carried() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor) -> Answer:
        state: Any = (self.table(ids), ids == 0, torch.zeros((), dtype=torch.int64))
        losses = []
        for block in self.chain:
            state, balance, _ = block(state)
            losses.append(balance)
        return Answer(self.head(state[0]), torch.stack(losses).sum(), state[2])


class Encoder(nn.Module):
    """torch's own encoder, with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, HIDDEN)
        layer = nn.TransformerEncoderLayer(
            HIDDEN, HEADS, 4 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, 3)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=torch.float64)
        return self.head(self.encoder(self.table(ids), mask=mask, is_causal=True).mean(1))


def mlp() -> nn.Module:
    widths = (6, 16, 16, 16, 3)
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Recurrent(nn.Module):
    """One block, called again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, HIDDEN)
        self.block = Layer()
        self.leave = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(LAYERS):
            x = self.block(x)
        return self.leave(x)


class Lstm(nn.Module):
    """An LSTM in front of a layer: no blocks, and what crosses a cut is a view beside its states."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.leave = nn.LSTM(5, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.cell(x)[0]
        return self.leave(outputs)


class Rezero(nn.Module):
    """Every layer behind a gate of its own, a parameter without dims; two more, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, HIDDEN)
        self.layers = nn.ModuleList(ScalarGate() for _ in range(LAYERS))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.tensor(0.2), requires_grad=False)
        self.leave = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x * self.scale + self.shift)


class ScalarGate(nn.Module):
    """x + gate · layer(x), as in ReZero (Bachlechner et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = Layer(), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.layer(x)


class GatedLayer(nn.Module):
    """Looks at numbers, so that it is no graph, and may draw: itself, or in a part that is one."""

    def __init__(
        self,
        width: int,
        *,
        looks: bool,
        dropout: float,
        inside: float,
        norm: float,
        also: Callable[[Tensor], Tensor] | None,
    ) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(width), nn.Dropout(norm))
        self.mix = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(inside), nn.Linear(2 * width, width)
        )
        self.drop, self.looks, self.also = nn.Dropout(dropout), looks, also

    def forward(self, x: Tensor) -> Tensor:
        moved = self.drop(self.mix(self.norm(x)))
        if self.looks and float(moved.detach().sum()) > 1e9:
            moved = moved / 2
        return x + (moved if self.also is None else self.also(moved))


class Gated(nn.Module):
    """A stack of them; in no table, since what it may draw decides where it may run.

    dropout   of the layers' own code · inside, norm  of their traced parts
    also      a function that their own code calls
    """

    def __init__(
        self,
        width: int = 8,
        layers: int = 2,
        *,
        looks: bool = True,
        dropout: float = 0.0,
        inside: float = 0.0,
        norm: float = 0.0,
        also: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        told = {"looks": looks, "dropout": dropout, "inside": inside, "norm": norm, "also": also}
        self.layers = nn.ModuleList(GatedLayer(width, **told) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Flat(nn.Module):
    """Works on tokens one after another and hands them on so, as layers of experts do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] to [batch · seq, width]."""
        moved: Tensor = self.down(self.up(x.reshape(-1, self.width)).relu())
        return moved


class FlatLayer(nn.Module):
    """Looks at a number on its way, so that it is no graph and is split by its parts only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.experts = nn.Linear(width, width), Flat(width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] to the same."""
        scale = 2.0 if float(x.detach().sum()) > 1e9 else 1.0
        return x + scale * self.experts(self.mix(x)).view(x.shape)


def named(pattern: str, count: int = LAYERS) -> tuple[str, ...]:
    return tuple(pattern.format(k) for k in range(count))


EXAMPLES: dict[str, Example] = {
    "nested": Example(Nested, tokens, named("parts.body.level_{}")),
    "unet": Example(
        UNet, lambda n: numbers(n, SEQUENCE, 5), (*named("down.{}", 3), *named("up.{}", 3))
    ),
    "tuples": Example(TupleBlocks, tokens, named("chain.{}")),
    "encoder": Example(Encoder, tokens, named("encoder.layers.{}")),
    "gpt": Example(Gpt, tokens, named("layers.{}")),
    "mlp": Example(mlp, lambda n: numbers(n, 6), ("0", "2", "4", "6")),
    "attributes": Example(Attributes, tokens, named("block{}")),
    "stages": Example(Stages, lambda n: numbers(n, SEQUENCE, 5), named("stages.{}")),
    "stem": Example(Stem, lambda n: numbers(n, SEQUENCE, 5), named("layers.{}")),
    "recurrent": Example(Recurrent, lambda n: numbers(n, SEQUENCE, 5), ("block",)),
    "lstm": Example(Lstm, lambda n: numbers(n, SEQUENCE, 5), ("cell", "leave")),
    "rezero": Example(Rezero, lambda n: numbers(n, SEQUENCE, 5), named("layers.{}")),
}
