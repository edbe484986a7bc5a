"""A small net on digits: Plateau, early stopping, the best model kept, curves for TensorBoard."""

import os
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.tensorboard import SummaryWriter

DOUBLE = "--float64" in sys.argv  # to compare layouts to the last digits
EPOCHS, PATIENCE = 4 if "--short" in sys.argv else 30, 5
folder = next((arg for arg in sys.argv[1:] if not arg.startswith("--")), "runs/digits-best")

images, classes = map(torch.from_numpy, load_digits(return_X_y=True))
images = images / 16 if DOUBLE else (images / 16).float()
train = torch.utils.data.TensorDataset(images[300:], classes[300:])
held_out = torch.utils.data.TensorDataset(images[:300], classes[:300])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Dropout(0.2), nn.Linear(48, 10))
model = model.double() if DOUBLE else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss()
loader = torch.utils.data.DataLoader(train, batch_size=64, shuffle=True)
curves = SummaryWriter(f"{folder}/tensorboard")
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=2)
best, worse, start = float("inf"), 0, 0
if os.path.exists(f"{folder}/last.pt"):
    last = torch.load(f"{folder}/last.pt")
    model.load_state_dict(last["model"])
    optimizer.load_state_dict(last["optimizer"])
    plateau.load_state_dict(last["plateau"])
    best, worse, start = last["best"], last["worse"], last["epochs"]


def evaluate() -> tuple[float, float]:
    model.eval()
    with torch.no_grad():
        outputs = model(held_out.tensors[0])
    right = (outputs.argmax(1) == held_out.tensors[1]).double().mean()
    return criterion(outputs, held_out.tensors[1]).item(), right.item()


for epoch in range(start, EPOCHS):
    if worse >= PATIENCE:
        break
    model.train()
    for inputs, targets in loader:
        loss = criterion(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found, right = evaluate()
    curves.add_scalar("validation/loss", found, epoch)
    curves.add_scalar("validation/accuracy", right, epoch)
    plateau.step(found)
    worse = 0 if found < best else worse + 1
    best = min(best, found)
    state = {"plateau": plateau.state_dict(), "best": best, "worse": worse, "epochs": epoch + 1}
    state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if not worse:
        torch.save(state, f"{folder}/best.pt")
    torch.save(state, f"{folder}/last.pt")
model.load_state_dict(torch.load(f"{folder}/best.pt")["model"])
right = evaluate()[1]
print(f"best {best!r}, {right:.1%} of images right that it never saw")
