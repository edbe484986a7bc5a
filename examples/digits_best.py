"""A small net on digits: Plateau, early stopping, the best model kept, curves for TensorBoard.

Shows: metrics by name, over all ranks; a scheduler, the best value and patience in the checkpoint.
Start: python examples/digits_best.py [FOLDER], and again to go on where it was
   or: python -m torch.distributed.run --nproc-per-node 2 examples/digits_best.py [FOLDER]
"""

import importlib.util
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import shoal
from shoal.sinks import TensorBoard

DOUBLE = "--float64" in sys.argv  # to compare layouts to the last digits
EPOCHS, PATIENCE = 4 if "--short" in sys.argv else 30, 5
folder = next((arg for arg in sys.argv[1:] if not arg.startswith("--")), "runs/digits-best")

images, classes = map(torch.from_numpy, load_digits(return_X_y=True))
images = images / 16 if DOUBLE else (images / 16).float()
train = torch.utils.data.TensorDataset(images[300:], classes[300:])
held_out = torch.utils.data.TensorDataset(images[:300], classes[:300])
metrics = {"accuracy": lambda outputs, targets: outputs.argmax(1) == targets}
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Dropout(0.2), nn.Linear(48, 10))
model = model.double() if DOUBLE else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run = shoal.parallelize(model, optimizer, batch=64, metrics=metrics, folder=folder)
if importlib.util.find_spec("tensorboard"):
    run.add_callback(TensorBoard(f"{folder}/tensorboard"))
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer, factor=0.3, patience=2)
best, worse = float("inf"), 0
if run.restore():
    plateau.load_state_dict(run.extra["plateau"])
    best, worse = run.extra["best"], run.extra["worse"]
for _epoch in run.epochs(EPOCHS):
    if worse >= PATIENCE:
        break
    for batch in run.loader(train):
        run.step(batch)
    found = run.evaluate(held_out)
    plateau.step(found["loss"])
    worse = 0 if found["loss"] < best else worse + 1
    best = min(best, found["loss"])
    state = {"plateau": plateau, "best": best, "worse": worse}
    if not worse:
        run.save(tag="best", extra=state)
    run.save(extra=state)
run.restore(tag="best")
right = run.evaluate(held_out)["accuracy"]
run.print(f"step {run.step_count}, best {best!r}, {right:.1%} of images right that it never saw")
run.close()
