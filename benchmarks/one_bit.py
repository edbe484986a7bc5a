"""What one-bit gradients lose, piece by piece: one process plays the ranks of a layout.

The small Llama and the text of `compressing.py`, plain AdamW and codes written once more in thirty
lines, so that one piece at a time can be left out: the code of the sum, blocks cut inside rows, the
first steps in int8. Settings are chosen with it, on seeds that judge nothing.

    python benchmarks/one_bit.py 12,13 none twice+cut+early=100 codes=4+early=100

prints a line per word, and adds rows to benchmarks/results/one_bit.jsonl; `--page` prints the table
of docs/how-it-works/compress.md of that file. A word is none, or

    early=N      the first N steps in int8 · codes=K   codes of a rank per step: 1 as under ddp and
                 zero1, 4 as under zero2 and fsdp here · twice   the sum is coded too, as under ddp
    cut          blocks begin where a rank's part does, not where rows do
    block=N      numbers under one scale · keeps=X     share of what is left out that comes back
    first=C, second=C   int8, sign or none in the place of the sign of gradients, of sums
    scaled       numbers are coded in units of √v as it was after the first steps
    freeze       v stays as it was after the first steps · rate=X   the rate is X times as high
    momentum     not gradients travel, but each rank's part of the momentum (1-bit Adam)

Source: Seide et al. 2014; Karimireddy et al. 2019; Tang et al. 2021 (momentum, frozen v)
Limits: blocks of fsdp are those of a whole vector; samples come in another order than in Shoal
"""

from __future__ import annotations

import json
import math
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from compressing import MODEL, OPTIMIZER, VALIDATED, WORDS

OUT = Path(__file__).resolve().parent / "results" / "one_bit.jsonl"
RANKS, STEPS, BATCH = 2, 300, 16
CHOSEN_ON = 12, 13
"""Seeds on which the default share of first steps was chosen; 11 was run for it afterwards."""
PAGE = {
    "codes=4+early=60": "`fsdp`, `zero2`: four codes a step, a fifth of the steps in int8",
    "codes=4+early=75": "the same, a quarter",
    "codes=4+early=100": "the same, a third",
    "early=100": "`zero1`: one code a step, a third",
    "twice+early=100": "`ddp`: one code a step, and one of the sum, a third",
    "twice+early=150": "the same, half of the steps",
    "twice+early=100+second=int8": "`ddp`, the sum in int8",
    "twice+cut+early=100": "`ddp`, blocks of the second rank's part over two rows each",
    "twice+early=100+keeps=0.9": "`ddp`, of what is left out 0.9 comes back",
    "twice+early=60": "`ddp`, a fifth of the steps in int8",
    "twice+early=60+scaled": "the same in units of √v after the first steps",
    "twice+early=60+freeze": "the same with v as it was after them",
    "twice+early=60+scaled+freeze": "both",
    "twice+early=60+momentum+freeze": "1-bit Adam: the momentum travels, v as it was",
    "twice+early=60+momentum+freeze+scaled": "1-bit Adam in units of √v",
    "none+freeze+early=60": "no codes, v as it was after a fifth of the steps",
}
"""Words that the page tells, and what they say there."""


def samples(seed: int) -> tuple[int, list[Any], Any]:
    """Give the vocabulary, the batches of all steps, and the held out samples."""
    from torch.utils.data import default_collate

    from shoal.config.load import load_config
    from shoal.data.sources import open_source

    source = open_source(load_config(None, WORDS).config.data, 0)
    collate = source.collate or default_collate
    mixed = torch.randperm(len(source.train), generator=torch.Generator().manual_seed(seed))
    order = mixed[: BATCH * STEPS].tolist()
    batches = [
        collate([source.train[i] for i in order[BATCH * k : BATCH * (k + 1)]]) for k in range(STEPS)
    ]
    held = range(0, len(source.validation), max(1, len(source.validation) // VALIDATED))
    return source.vocabulary, batches, collate([source.validation[i] for i in held])


class Blocks:
    """Codes of a vector in blocks, decoded at once; blocks begin anew at every one of `starts`."""

    def __init__(self, elements: int, starts: list[int], block: int) -> None:
        self.at, self.number = torch.empty(elements, dtype=torch.long), 0
        for first, last in pairwise([*starts, elements]):
            self.at[first:last] = torch.arange(last - first) // block + self.number
            self.number = int(self.at[last - 1]) + 1
        self.counts = torch.bincount(self.at, minlength=self.number).float()

    def sign(self, x: torch.Tensor) -> torch.Tensor:
        """A sign, and the mean magnitude of the block."""
        mean = torch.zeros(self.number).index_add_(0, self.at, x.abs()) / self.counts
        return torch.where(x < 0, -1.0, 1.0) * mean[self.at]

    def int8(self, x: torch.Tensor) -> torch.Tensor:
        """Multiples of the largest magnitude / 127."""
        most = torch.zeros(self.number).scatter_reduce_(0, self.at, x.abs(), "amax")
        most = most.clamp(min=1e-36)[self.at]
        return torch.round(x * (127 / most)) * (most / 127)


class Sum:
    """The sum of a step's gradients over the ranks, in codes, with both errors fed back."""

    def __init__(self, elements: int, word: dict[str, Any]) -> None:
        self.word, self.scale = word, torch.ones(elements)
        starts = [0, elements // 2] if "cut" in word else [0]
        self.codes = {
            "sign": Blocks(elements, starts, word.get("block", 64)).sign,
            "int8": Blocks(elements, starts, 1024).int8,
            "none": lambda x: x,
        }
        self.left = [torch.zeros(elements) for _ in range(RANKS)]
        self.left_of_sum = torch.zeros(elements)

    def code(self, which: str, late: bool) -> Any:
        """What codes gradients ("first"), and sums ("second")."""
        if "none" in self.word or (which == "second" and "twice" not in self.word):
            return self.codes["none"]
        return self.codes[self.word.get(which, "sign") if late else "int8"]

    def __call__(self, sent: list[list[torch.Tensor]], late: bool) -> torch.Tensor:
        """sent[k][rank] in the order in which they are sent."""
        keeps, total = self.word.get("keeps", 1.0), torch.zeros_like(self.scale)
        for ranks in sent:
            for rank, gradient in enumerate(ranks):
                whole = gradient / self.scale + keeps * self.left[rank]
                coded = self.code("first", late)(whole)
                self.left[rank] = whole - coded
                total += coded
        whole = total + keeps * self.left_of_sum
        coded = self.code("second", late)(whole)
        self.left_of_sum = whole - coded
        return coded * self.scale


def train(seed: int, word: dict[str, Any]) -> dict[str, float]:
    """Train with what a word says and give the loss on the held out part."""
    from shoal.models.catalog import build
    from shoal.trainer.step.call_contract import default_loss

    vocabulary, batches, held = samples(seed)
    torch.manual_seed(seed)
    model = build("llama", MODEL, vocabulary=vocabulary, sequence=64)
    loss_of = default_loss()
    parameters = list(model.parameters())[::-1]  # as they lie in ddp's bucket
    weights = torch.cat([p.detach().flatten() for p in parameters])
    gradient, place = torch.zeros_like(weights), 0
    for p in parameters:
        p.data, p.grad = (t[place : place + p.numel()].view_as(p) for t in (weights, gradient))
        place += p.numel()
    sums, early, codes = Sum(place, word), word.get("early", 0), word.get("codes", 1)
    m, v = torch.zeros(place), torch.zeros(place)
    rate, (b1, b2), decay = (OPTIMIZER[key] for key in ("lr", "betas", "weight_decay"))
    warm, each, losses = OPTIMIZER["warmup"], BATCH // RANKS // codes, []
    for step, (tokens, targets) in enumerate(batches):
        late, t = step >= early, step + 1
        if "scaled" in word and step == early:
            root = (v / (1 - b2**step)).sqrt()
            sums.scale = root + 0.01 * root.mean()
        moments, sent, told, count = "momentum" in word and late, [], 0.0, 0
        for k in range(codes):
            sent.append([])
            for rank in range(RANKS):
                first = BATCH // RANKS * rank + each * k
                gradient.zero_()
                loss, number = loss_of(
                    model(tokens[first : first + each]), targets[first : first + each]
                )[:2]
                loss.backward()
                told, count = told + loss.item(), count + int(number)
                own = gradient.clone()
                if moments:
                    own = b1 * m / RANKS + (1 - b1) * own / targets.numel()
                sent[k].append(own)
        losses.append(told / count)
        total = sums(sent, late)
        if moments:
            m = total
        else:
            total /= count
            total *= min(1.0, OPTIMIZER["clip"] / (float(total.norm()) + 1e-6))
            m = b1 * m + (1 - b1) * total
            if "freeze" not in word or not late:
                v = b2 * v + (1 - b2) * total * total
        seen = min(t, early) if "freeze" in word and late else t
        lr = rate * (word.get("rate", 1.0) if late else 1.0)
        cosine = 0.5 * (1 + math.cos(math.pi * (t - warm) / (STEPS - warm)))
        lr *= t / warm if t <= warm else cosine
        weights.mul_(1 - lr * decay)
        weights.sub_(lr * (m / (1 - b1**t)) / ((v / (1 - b2**seen)).sqrt() + 1e-8))
    with torch.no_grad():
        loss, number = loss_of(model(held[0]), held[1])[:2]
    return {"loss": float(loss) / int(number), "train": sum(losses[-20:]) / 20}


def read(text: str) -> dict[str, Any]:
    """What a word says, by name."""
    found: dict[str, Any] = {}
    for one in text.split("+"):
        key, _, value = one.partition("=")
        number = value.replace(".", "", 1).isdigit()
        found[key] = (float(value) if "." in value else int(value)) if number else value
    return found


def table() -> list[str]:
    """Lines of the page: losses against none."""
    found: dict[str, dict[int, float]] = {}
    for row in map(json.loads, OUT.read_text().splitlines()):
        found.setdefault(row["word"], {})[row["seed"]] = row["loss"]
    said = ", ".join(map(str, CHOSEN_ON))
    lines = [f"| mean of seeds {said} | against no codes |", "|---|---|"]
    exact = sum(found["none"][seed] for seed in CHOSEN_ON)
    for word, said in PAGE.items():
        share = sum(found[word][seed] for seed in CHOSEN_ON) / exact - 1
        lines.append(f"| {said} | {share:+.2%} |")
    return lines


def main() -> None:
    if sys.argv[1] == "--page":
        print("\n".join(table()))
        return
    torch.set_num_threads(1)
    seeds, words = [int(seed) for seed in sys.argv[1].split(",")], sys.argv[2:]
    for text in words:
        rows = []
        for seed in seeds:
            before_s = sum(os.times()[:2])
            row: dict[str, Any] = {"word": text, "seed": seed, **train(seed, read(text))}
            rows.append(row | {"cpu_s": round(sum(os.times()[:2]) - before_s, 1)})
            with OUT.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
        losses = [row["loss"] for row in rows]
        print(text, *(f"{one:.4f}" for one in losses), f"mean {sum(losses) / len(losses):.4f}")


if __name__ == "__main__":
    main()
