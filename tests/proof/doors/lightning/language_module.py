"""A language model: groups without decay, a warm-up by hand, predictions, a file saved by the trainer.

python language_module.py [--strategy shoal] [--resume]
"""

import argparse
import math

import doors_args as doors
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Counts(Dataset):
    def __init__(self, count, seed):
        draws = torch.Generator().manual_seed(seed)
        start = torch.randint(0, 24, (count, 1), generator=draws)
        self.ids = (start + torch.arange(8) * torch.randint(1, 4, (count, 1), generator=draws)) % 24

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i, :-1], self.ids[i, 1:]


class Decoder(pl.LightningModule):
    def __init__(self, width=16, layers=2, lr=8e-3, warm=6):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(24, width)
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, batch_first=True, bias=False)
             for _ in range(layers)]
        )  # fmt: skip
        self.head = nn.Linear(width, 24, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) / math.sqrt(self.hparams.width)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)

    def _loss(self, batch):
        return nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log_dict({"val/loss": loss, "val/ppl": loss.exp()}, sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])[:, -1].argmax(-1)

    def on_train_epoch_end(self):
        mean = self.all_gather(self.trainer.callback_metrics["train/loss"]).mean()
        if self.trainer.is_global_zero:
            print("epoch", self.current_epoch, mean.item())

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, betas=(0.9, 0.95))
        warm = self.hparams.warm
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, (s + 1) / warm))
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 1}]


def main():
    args = doors.parse(argparse.ArgumentParser())
    pl.seed_everything(3, verbose=False)
    model = Decoder()
    trainer = pl.Trainer(
        **doors.trainer(args), max_epochs=4 if args.resume else 2, logger=False,
        gradient_clip_val=1.0, enable_checkpointing=False, check_val_every_n_epoch=1,
        limit_val_batches=3,
    )  # fmt: skip
    train = DataLoader(Counts(72, 0), batch_size=6, shuffle=True, drop_last=True)
    held = DataLoader(Counts(24, 1), batch_size=4)
    trainer.fit(model, train, held, ckpt_path="decoder.ckpt" if args.resume else None)
    doors.show(trainer)
    trainer.save_checkpoint("decoder.ckpt")
    trainer.save_checkpoint("decoder-weights.ckpt", weights_only=True)
    found = trainer.predict(model, held)
    doors.show(trainer, predicted=sum(int(one.sum()) for one in found), batches=len(found))


if __name__ == "__main__":
    main()
