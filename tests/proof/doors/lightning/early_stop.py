"""An early stop and a plateau, accumulation, clipping by value, validation several times in an epoch.

python early_stop.py [--strategy shoal] [--resume]
"""

import argparse

import doors_args as doors
import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader


class Forecast(L.LightningModule):
    def __init__(self, hidden=12):
        super().__init__()
        self.save_hyperparameters()
        self.rnn = nn.LSTM(1, hidden, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(hidden, 1)
        self.loss = nn.HuberLoss()

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(self(batch["x"]), batch["y"])
        self.log("loss", loss)
        return {"loss": loss, "size": len(batch["x"])}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("last_loss", outputs["loss"], sync_dist=True)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        error = self.loss(self(batch["x"]), batch["y"])
        self.log("val", error, sync_dist=True, batch_size=len(batch["x"]), add_dataloader_idx=True)

    def configure_optimizers(self):
        optimizer = torch.optim.RMSprop(self.parameters(), lr=5e-3)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.4)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val/dataloader_idx_0"},
        }


class Rows(torch.utils.data.Dataset):
    def __init__(self, start, count):
        t = start + torch.arange(count)[:, None] * 0.37 + torch.arange(7)[None] * 0.5
        self.rows = torch.sin(t) + 0.2 * torch.cos(3 * t)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"x": self.rows[i, :6, None], "y": self.rows[i, 6:]}


def main():
    args = doors.parse(argparse.ArgumentParser())
    L.seed_everything(2, verbose=False)
    model = Forecast()
    keeps = ModelCheckpoint(dirpath="forecast", monitor="val/dataloader_idx_0", save_top_k=2,
                            filename="{epoch}-{step}", save_last=True)  # fmt: skip
    stops = EarlyStopping("val/dataloader_idx_1", patience=3, min_delta=1e-3)
    trainer = L.Trainer(
        **doors.trainer(args), max_epochs=6 if args.resume else 3, logger=False,
        accumulate_grad_batches=3, gradient_clip_val=0.02, gradient_clip_algorithm="value",
        val_check_interval=0.5, num_sanity_val_steps=1, callbacks=[keeps, stops],
    )  # fmt: skip
    train = DataLoader(Rows(0, 100), batch_size=5, shuffle=True)
    held = [DataLoader(Rows(40, 20), batch_size=5), DataLoader(Rows(60, 16), batch_size=4)]
    if not args.resume:
        trainer.validate(model, held, verbose=False)
        doors.show(trainer)
    trainer.fit(model, train, held, ckpt_path="forecast/last.ckpt" if args.resume else None)
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    doors.show(trainer, rate=rate, stopped=stops.stopped_epoch, waited=stops.wait_count)
    if trainer.is_global_zero:
        torch.save(model.state_dict(), "forecast/weights.pt")


if __name__ == "__main__":
    main()
