"""Weights averaged by Lightning's own callback, a batch of a dict, two schedules in a row.

python stochastic_average.py [--strategy shoal] [--resume]
"""

import argparse

import doors_args as doors
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader


class Pairs(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        draws = torch.Generator().manual_seed(seed)
        self.a = torch.randn(count, 7, generator=draws)
        self.b = self.a + 0.4 * torch.randn(count, 7, generator=draws)

    def __len__(self):
        return len(self.a)

    def __getitem__(self, i):
        return {"a": self.a[i], "b": self.b[i], "id": i}


class Contrast(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 20), nn.ReLU(), nn.Linear(20, 5))
        self.temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return nn.functional.normalize(self.net(x), dim=-1)

    def _scores(self, batch):
        return self(batch["a"]) @ self(batch["b"]).T * self.temperature.exp()

    def training_step(self, batch, batch_idx):
        scores = self._scores(batch)
        wanted = torch.arange(len(scores))
        loss = nn.functional.cross_entropy(scores, wanted)
        return (loss + nn.functional.cross_entropy(scores.T, wanted)) / 2

    def validation_step(self, batch, batch_idx):
        scores = self._scores(batch)
        right = scores.argmax(1) == torch.arange(len(scores))
        self.log("right", right.float().mean(), sync_dist=True)
        self.log("margin", scores.diagonal().mean() - scores.mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.NAdam(self.parameters(), lr=1e-2)
        parts = [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, 2),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ]
        return [optimizer], [torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2])]


def main():
    args = doors.parse(argparse.ArgumentParser())
    L.seed_everything(6, verbose=False)
    keeps = ModelCheckpoint(dirpath="contrast", save_last=True, save_top_k=0)
    trainer = L.Trainer(
        **doors.trainer(args), max_epochs=6, logger=False, max_steps=40 if args.resume else 24,
        callbacks=[keeps, StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=0.5)],
    )  # fmt: skip
    model = Contrast()
    trainer.fit(
        model, DataLoader(Pairs(84, 0), batch_size=6, shuffle=True),
        DataLoader(Pairs(24, 1), batch_size=6),
        ckpt_path="contrast/last.ckpt" if args.resume else None,
    )  # fmt: skip
    doors.show(trainer, step=trainer.global_step, temperature=model.temperature)
    if trainer.is_global_zero:
        torch.save({"net": model.net.state_dict()}, "contrast/final.pth")


if __name__ == "__main__":
    main()
