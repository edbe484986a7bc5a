"""Batches of its own sampler, several training loaders at once, a loss that is sometimes skipped.

python own_loaders.py [--strategy shoal] [--resume]
"""

import argparse

import doors_args as doors
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoTasks(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 16), nn.ReLU())
        self.heads = nn.ModuleDict({"a": nn.Linear(16, 2), "b": nn.Linear(16, 1)})

    def training_step(self, batch, batch_idx):
        xa, ya = batch["a"]
        loss = nn.functional.cross_entropy(self.heads["a"](self.trunk(xa)), ya)
        if batch_idx % 3 != 2:
            xb, yb = batch["b"]
            loss = loss + nn.functional.mse_loss(self.heads["b"](self.trunk(xb))[:, 0], yb)
        if batch_idx == 4:
            return None
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log(
            "val_a", nn.functional.cross_entropy(self.heads["a"](self.trunk(x)), y), sync_dist=True
        )

    def configure_optimizers(self):
        return {"optimizer": torch.optim.Adagrad(self.parameters(), lr=0.05)}


class Data(L.LightningDataModule):
    def prepare_data(self):
        pass

    def setup(self, stage):
        draws = torch.Generator().manual_seed(0)
        x = torch.randn(120, 5, generator=draws)
        self.a = TensorDataset(x[:48], (x[:48, 0] > 0).long())
        self.b = TensorDataset(x[48:96], x[48:96].sum(1))
        self.held = TensorDataset(x[96:], (x[96:, 0] > 0).long())

    def train_dataloader(self):
        size, rank = self.trainer.world_size, self.trainer.global_rank
        own = {"num_replicas": size, "rank": rank, "shuffle": True, "seed": 5}
        return CombinedLoader({
            "a": DataLoader(self.a, batch_size=4, sampler=DistributedSampler(self.a, **own)),
            "b": DataLoader(self.b, batch_size=6, sampler=DistributedSampler(self.b, **own)),
        }, "min_size")  # fmt: skip

    def val_dataloader(self):
        return DataLoader(self.held, batch_size=4)


def main():
    args = doors.parse(argparse.ArgumentParser())
    L.seed_everything(8, verbose=False)
    keeps = ModelCheckpoint(dirpath="tasks", save_last=True, monitor="val_a")
    trainer = L.Trainer(
        **doors.trainer(args), max_epochs=5 if args.resume else 3, logger=False, callbacks=[keeps]
    )
    model = TwoTasks()
    trainer.fit(model, datamodule=Data(), ckpt_path="tasks/last.ckpt" if args.resume else None)
    doors.show(trainer, step=trainer.global_step)


if __name__ == "__main__":
    main()
