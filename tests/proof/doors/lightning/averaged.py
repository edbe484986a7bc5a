"""A moving average in a callback with a state of its own, hooks around the update, gradients' norms logged.

python averaged.py [--strategy shoal] [--resume]
"""

import argparse
import copy

import doors_args as doors
import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, Timer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MovingAverage(Callback):
    def __init__(self, decay=0.8):
        self.decay, self.weights, self.steps = decay, None, 0

    def on_train_start(self, trainer, module):
        if self.weights is None:
            self.weights = copy.deepcopy(module.state_dict())

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps += 1
        with torch.no_grad():
            for name, value in module.state_dict().items():
                if value.is_floating_point():
                    self.weights[name].lerp_(value, 1 - self.decay)

    def on_validation_start(self, trainer, module):
        if self.weights is not None and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.kept = copy.deepcopy(module.state_dict())
            module.load_state_dict(self.weights)

    def on_validation_end(self, trainer, module):
        if self.weights is not None and trainer.state.fn == "fit" and not trainer.sanity_checking:
            module.load_state_dict(self.kept)

    def state_dict(self):
        return {"steps": self.steps, "weights": self.weights}

    def load_state_dict(self, state):
        self.steps, self.weights = state["steps"], state["weights"]


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.norms = []

    def forward(self, x):
        return self.net(x)[:, 0]

    def training_step(self, batch, batch_idx):
        self.seen += len(batch[0])
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer):
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.norms.append(torch.stack(norms).norm().item())

    def validation_step(self, batch, batch_idx):
        self.log("held", (self(batch[0]) - batch[1]).abs().mean(), sync_dist=True)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["norms"] = self.norms

    def on_load_checkpoint(self, checkpoint):
        self.norms = checkpoint["norms"]

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)]


def main():
    args = doors.parse(argparse.ArgumentParser())
    L.seed_everything(5, verbose=False)
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(90, 6, generator=draws)
    data = TensorDataset(x, x[:, 0] * x[:, 1] + x[:, 2])
    train = DataLoader(data, batch_size=6, shuffle=True)
    held = DataLoader(torch.utils.data.Subset(data, range(66, 90)), batch_size=6)
    average = MovingAverage()
    keeps = ModelCheckpoint(
        dirpath="averaged", every_n_train_steps=5, save_top_k=-1, filename="at-{step}"
    )
    trainer = L.Trainer(
        **doors.trainer(args), max_epochs=5 if args.resume else 3, logger=False,
        callbacks=[average, keeps, Timer(duration={"hours": 1})],
    )  # fmt: skip
    model = Regression()
    trainer.fit(model, train, held, ckpt_path="averaged/at-step=20.ckpt" if args.resume else None)
    total = average.weights["net.0.weight"].norm()
    doors.show(trainer, steps=average.steps, average=total, seen=model.seen)
    doors.show(trainer, norms=len(model.norms), norm=sum(model.norms))


if __name__ == "__main__":
    main()
