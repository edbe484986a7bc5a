"""A small residual network learns scikit-learn's handwritten digits in a loop of your own.

Shows: parallelize, a loader that is sharded and resumable, BatchNorm, evaluate with a metric.
Start: python examples/digits_cnn.py
   or: python -m torch.distributed.run --nproc-per-node 2 examples/digits_cnn.py
Both compute the same, to rounding (which grows from step to step; precision="fp64" shows it).
Needs: pip install scikit-learn
"""

import torch
from sklearn.datasets import load_digits

import shoal
from shoal.models.resnet import ResNet

EPOCHS = 8


def digits() -> tuple[list, list]:
    """(training, held-out) lists of (image [1, 8, 8], label); every fifth image is held out."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    pairs = list(zip(pixels, torch.tensor(labels), strict=True))
    return [p for k, p in enumerate(pairs) if k % 5], pairs[::5]


def right(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One boolean per image; shoal sums and counts over all ranks."""
    return logits.argmax(-1) == labels


class Images(torch.utils.data.Dataset):
    """A list as a map-style dataset."""

    def __init__(self, pairs: list) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pairs[index]


train, held_out = (Images(pairs) for pairs in digits())
run = shoal.parallelize(
    lambda: ResNet(classes=10, image_channels=1, channels=8, width=1, stages=2, blocks=1),
    lambda parameters: torch.optim.AdamW(parameters, lr=5e-3, fused=True),
    batch=64,  # over all ranks; without a loss of your own it is cross-entropy
)
for epoch in run.epochs(EPOCHS):
    for batch in run.loader(train):
        result = run.step(batch)
    values = run.evaluate(held_out, {"accuracy": right})
    if run.world.is_first:
        print(f"epoch {epoch + 1}: loss {result.loss:.3f}, held out {values['accuracy']:.1%} right")
run.close()
