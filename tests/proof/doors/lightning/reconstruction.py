"""An autoencoder by steps: max_steps, checkpoints every few steps, TensorBoard-free logs, a resume inside an epoch.

python reconstruction.py [--strategy shoal] [--resume]
"""

import argparse

import doors_args as doors
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AutoEncoder(pl.LightningModule):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.save_hyperparameters(ignore=["encoder", "decoder"])
        self.encoder, self.decoder = encoder, decoder
        self.validation_outputs = []

    def forward(self, x):
        return self.encoder(x)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        z = self.encoder(x)
        noise = 0.05 * torch.randn_like(z)
        loss = nn.functional.mse_loss(self.decoder(z + noise), x)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        error = (self.decoder(self.encoder(x)) - x).square().mean(1)
        self.validation_outputs.append(error)
        return error

    def on_validation_epoch_end(self):
        errors = self.all_gather(torch.cat(self.validation_outputs)).flatten()
        self.validation_outputs.clear()
        self.log("val_error", errors.mean(), rank_zero_only=True)
        self.log("val_worst", errors.max(), rank_zero_only=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()


def main():
    args = doors.parse(argparse.ArgumentParser())
    pl.seed_everything(7, verbose=False)
    encoder = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
    decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 10))
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(96, 3, generator=draws) @ torch.randn(3, 10, generator=draws)
    train = DataLoader(TensorDataset(x[:72]), batch_size=4)
    held = DataLoader(TensorDataset(x[72:]), batch_size=4, shuffle=False)
    keeps = ModelCheckpoint(
        dirpath="codes", every_n_train_steps=6, save_top_k=-1, filename="{step}"
    )
    trainer = pl.Trainer(
        **doors.trainer(args), max_steps=27 if args.resume else 15, logger=False,
        callbacks=[keeps], val_check_interval=4, use_distributed_sampler=True,
        reload_dataloaders_every_n_epochs=0,
    )  # fmt: skip
    model = AutoEncoder(encoder, decoder)
    trainer.fit(model, train, held, ckpt_path="codes/step=12.ckpt" if args.resume else None)
    doors.show(trainer, step=trainer.global_step, epoch=trainer.current_epoch)
    trainer.strategy.barrier()
    if trainer.is_global_zero:
        torch.save(encoder.state_dict(), "codes/encoder.pt")
        doors.show(trainer, norm=encoder[0].weight.norm())


if __name__ == "__main__":
    main()
