"""A module and a data module: the best and the last checkpoint, a CSV of curves, a test of the best.

python digits_module.py [--strategy shoal] [--resume]
"""

import argparse

import doors_args as doors
import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class DigitsData(L.LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        draws = torch.Generator().manual_seed(0)
        x = torch.randn(130, 1, 6, 6, generator=draws)
        data = TensorDataset(x, (x[:, 0, :3].sum((1, 2)) > x[:, 0, 3:].sum((1, 2))).long())
        self.train, self.val, self.test = random_split(
            data, [90, 20, 20], generator=torch.Generator().manual_seed(42)
        )

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=self.hparams.batch_size)


class DigitsModel(L.LightningModule):
    def __init__(self, width=8, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(),
            nn.Dropout(0.1), nn.Linear(width * 36, 2),
        )  # fmt: skip

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def _shared_eval(self, batch, name):
        x, y = batch
        scores = self(x)
        self.log(f"{name}_loss", nn.functional.cross_entropy(scores, y), sync_dist=True)
        self.log(f"{name}_acc", (scores.argmax(1) == y).float().mean(), sync_dist=True)

    def validation_step(self, batch, batch_idx):
        self._shared_eval(batch, "val")

    def test_step(self, batch, batch_idx):
        self._shared_eval(batch, "test")

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    args = doors.parse(argparse.ArgumentParser())
    L.seed_everything(1, verbose=False)
    keeps = ModelCheckpoint(
        dirpath="digits", monitor="val_loss", mode="min", save_top_k=1, save_last=True,
        filename="best-{epoch}",
    )  # fmt: skip
    logger = CSVLogger("curves", name="digits", version=int(args.resume))
    trainer = L.Trainer(
        **doors.trainer(args), max_epochs=5 if args.resume else 3, logger=logger,
        log_every_n_steps=2, callbacks=[keeps, LearningRateMonitor("step")],
    )  # fmt: skip
    model, data = DigitsModel(), DigitsData()
    trainer.fit(model, data, ckpt_path="digits/last.ckpt" if args.resume else None)
    doors.show(trainer, best=keeps.best_model_score, step=trainer.global_step)
    trainer.test(model, data, ckpt_path="best", verbose=False)
    doors.show(trainer)
    if trainer.is_global_zero:
        again = DigitsModel.load_from_checkpoint(keeps.best_model_path, map_location="cpu")
        doors.show(trainer, width=again.hparams.width, norm=again.net[5].weight.norm())


if __name__ == "__main__":
    main()
