"""A script of Lightning's: accumulation, clipping, a schedule, dropout, validation, a checkpoint.

python lightning_script.py OUT STRATEGY ACCUMULATION PRECISION [FROM]   under torchrun, or with devices=SIZE
"""

import importlib
import json
import os
import sys

import torch
from torch import nn

OUT, STRATEGY, ACCUMULATION, PRECISION = sys.argv[1:5]
FROM = sys.argv[5] if len(sys.argv) > 5 else "kept/epoch=1.ckpt"
PACKAGE = os.environ.get("LIGHTNING", "lightning.pytorch")
SIZE = int(os.environ.get("WORLD_SIZE", os.environ.get("SIZE", "1")))
pl = importlib.import_module(PACKAGE)
if STRATEGY.startswith("shoal"):
    import shoal.neighbours.lightning
FORMAT = torch.float64 if PRECISION == "64-true" else torch.float32


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.first = nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))
        self.last = nn.Linear(64, 4)
        self.drop = nn.Dropout(0.1)
        self.found = []

    def forward(self, inputs):
        x = self.first(inputs).tanh()
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.drop(x))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self(inputs), targets)
        self.log("loss", loss, sync_dist=True)
        self.found.append(["loss", loss.item()])
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        self.log("held", nn.functional.mse_loss(self(inputs), targets), sync_dist=True)

    def on_before_optimizer_step(self, optimizer):
        held = [p for group in optimizer.param_groups for p in group["params"]]
        grads = [p.grad for p in held if p.grad is not None]
        square = sum((g.square().sum() for g in grads), torch.zeros((), dtype=FORMAT))
        if STRATEGY in ("ddp", "shoal", "shoal_ddp"):  # others step parts of weights
            self.found.append(["norm", square.sqrt().item()])

    def on_validation_end(self):
        self.found.append(["held", self.trainer.callback_metrics["held"].item()])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def trainer(epochs, **more):
    strategy = STRATEGY
    if STRATEGY.startswith("shoal:"):
        strategy = shoal.neighbours.lightning.ShoalStrategy(layout=STRATEGY.removeprefix("shoal:"))
    return pl.Trainer(
        accelerator="cpu", devices=SIZE, strategy=strategy, max_epochs=epochs, logger=False,
        accumulate_grad_batches=int(ACCUMULATION), gradient_clip_val=1.0, precision=PRECISION,
        enable_progress_bar=False, enable_model_summary=False, deterministic=True, **more,
    )  # fmt: skip


def main():
    pl.seed_everything(1, verbose=False)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(203, 16, generator=generator)
    data = torch.utils.data.TensorDataset(inputs, inputs @ torch.randn(16, 4, generator=generator))
    train = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    held = torch.utils.data.DataLoader(data, batch_size=16)
    model = Model()
    keeps = pl.callbacks.ModelCheckpoint("kept", save_top_k=-1, filename="{epoch}")
    one = trainer(3, callbacks=[keeps])
    one.fit(model, train, held)
    # The same again from the end of the second epoch, by another module.
    again = Model()
    torch.manual_seed(7)
    other = trainer(3, enable_checkpointing=False)
    other.fit(again, train, held, ckpt_path=FROM)
    if one.is_global_zero:
        whole = torch.load("kept/epoch=2.ckpt", weights_only=True)
        state = whole["optimizer_states"][0]["state"]
        weights = {name: one.double().norm().item() for name, one in whole["state_dict"].items()}
        moments = [one["exp_avg"].double().norm().item() for _, one in sorted(state.items())]
        found = {"steps": model.found, "again": again.found, "weights": weights, "moments": moments}
        found["global_step"] = one.global_step
        with open(OUT, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
