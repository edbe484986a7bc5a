"""Classes with torchmetrics over ranks, label smoothing, a validation in training mode, a schedule by epochs.

python vision_by_torchmetrics.py [--strategy shoal] [--resume]
"""

import argparse

import doors_args as doors
import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Vision(L.LightningModule):
    def __init__(self, classes=3):
        super().__init__()
        self.save_hyperparameters()
        self.features = nn.Sequential(
            nn.Conv2d(2, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 2),
            nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.classify = nn.Linear(6, classes)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=classes)
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=classes)
        self.val_mean = torchmetrics.MeanMetric()

    def forward(self, x):
        return self.classify(self.features(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x)
        self.train_acc(scores, y)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        return self.criterion(scores, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x)
        self.val_acc.update(scores, y)
        self.val_mean.update(self.criterion(scores, y), len(y))
        self.log("val_acc", self.val_acc)
        self.log("val_mean", self.val_mean)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


def main():
    args = doors.parse(argparse.ArgumentParser())
    L.seed_everything(10, verbose=False)
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(117, 2, 7, 7, generator=draws)
    data = TensorDataset(x, x.mean((2, 3)).gt(0).sum(1))
    train = DataLoader(torch.utils.data.Subset(data, range(88)), batch_size=11, shuffle=True)
    held = DataLoader(torch.utils.data.Subset(data, range(88, 117)), batch_size=8)
    keeps = ModelCheckpoint(dirpath="vision", monitor="val_mean", save_last=True)
    trainer = L.Trainer(
        **doors.trainer(args), max_epochs=5 if args.resume else 3, logger=False, callbacks=[keeps]
    )
    model = Vision()
    trainer.fit(model, train, held, ckpt_path="vision/last.ckpt" if args.resume else None)
    doors.show(trainer, mean=model.features[1].running_mean.sum())
    found = trainer.validate(model, held, ckpt_path=keeps.best_model_path, verbose=False)
    doors.show(trainer, best=found[0]["val_mean"], tracked=model.features[1].num_batches_tracked)


if __name__ == "__main__":
    main()
