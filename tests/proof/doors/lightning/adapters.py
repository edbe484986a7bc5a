"""A frozen base with adapters: only these in the file, losses logged by groups, weights loaded in part.

python adapters.py [--strategy shoal] [--resume]
"""

import argparse
import os

import doors_args as doors
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Adapted(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


class Tuned(L.LightningModule):
    strict_loading = False

    def __init__(self):
        super().__init__()
        self.first, self.second = Adapted(nn.Linear(9, 18)), Adapted(nn.Linear(18, 4))
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return self.second(self.drop(torch.relu(self.first(x))))

    def training_step(self, batch, batch_idx):
        x, y = batch
        losses = nn.functional.cross_entropy(self(x), y, reduction="none")
        self.log(
            "hard", losses.max(), reduce_fx="max", sync_dist=True, on_epoch=True, on_step=False
        )
        return losses.mean()

    def validation_step(self, batch, batch_idx):
        self.log("val", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def state_dict(self, *args, **named):
        whole = super().state_dict(*args, **named)
        return {name: value for name, value in whole.items() if "base" not in name}

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=2e-2)


def main():
    args = doors.parse(argparse.ArgumentParser())
    L.seed_everything(9, verbose=False)
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(92, 9, generator=draws)
    data = TensorDataset(x, x[:, :4].argmax(1))
    train = DataLoader(data, batch_size=7, shuffle=True)
    held = DataLoader(torch.utils.data.Subset(data, range(72, 92)), batch_size=7)
    model = Tuned()
    if args.resume:
        kept = torch.load("adapters/last.ckpt", map_location="cpu", weights_only=True)
        print("tensors", len(kept["state_dict"])) if os.environ.get("RANK") == "0" else None
    keeps = ModelCheckpoint(dirpath="adapters", save_last=True, save_weights_only=False)
    trainer = L.Trainer(
        **doors.trainer(args), max_epochs=4 if args.resume else 2, logger=False,
        accumulate_grad_batches=2, gradient_clip_val=0.5, callbacks=[keeps],
    )  # fmt: skip
    trainer.fit(model, train, held, ckpt_path="adapters/last.ckpt" if args.resume else None)
    doors.show(trainer, up=model.first.up.norm())
    if trainer.is_global_zero:
        torch.save(model.state_dict(), "adapters/only.pt")


if __name__ == "__main__":
    main()
