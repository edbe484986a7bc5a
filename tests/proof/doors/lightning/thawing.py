"""A trunk that thaws in mid-training: a fine-tuning callback, a group that comes later, a frozen BatchNorm.

python thawing.py [--strategy shoal] [--resume]
"""

import argparse

import doors_args as doors
import lightning as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Thaw(BaseFinetuning):
    def __init__(self, at=1):
        super().__init__()
        self.at = at

    def freeze_before_training(self, module):
        self.freeze(module.trunk, train_bn=True)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == self.at:
            self.unfreeze_and_add_param_group(
                modules=module.trunk, optimizer=optimizer, lr=1e-3, train_bn=False
            )


class Finetuned(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.trunk(x))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=1e-2)


def main():
    args = doors.parse(argparse.ArgumentParser())
    L.seed_everything(4, verbose=False)
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(80, 8, generator=draws)
    data = TensorDataset(x, x[:, :3].argmax(1))
    train = DataLoader(data, batch_size=5, shuffle=True)
    held = DataLoader(torch.utils.data.Subset(data, range(60, 80)), batch_size=5)
    keeps = ModelCheckpoint(dirpath="thawed", save_last=True)
    trainer = L.Trainer(
        **doors.trainer(args), max_epochs=4 if args.resume else 3, logger=False,
        callbacks=[Thaw(), keeps],
    )  # fmt: skip
    model = Finetuned()
    trainer.fit(model, train, held, ckpt_path="thawed/last.ckpt" if args.resume else None)
    groups = trainer.optimizers[0].param_groups
    doors.show(trainer, groups=len(groups), norm=model.trunk[0].weight.norm())


if __name__ == "__main__":
    main()
