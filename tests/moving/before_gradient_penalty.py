"""Digits whose answers change little with their pixels: a penalty on the gradient by the inputs."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

EPOCHS = 12
PENALTY = 0.3

images, classes = map(torch.from_numpy, load_digits(return_X_y=True))
images = (images / 16).float()
train = torch.utils.data.TensorDataset(images[300:], classes[300:])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Softplus(), nn.Dropout(0.1), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(train, batch_size=64, shuffle=True)
for _epoch in range(EPOCHS):
    for inputs, targets in loader:
        inputs.requires_grad_()
        loss = F.cross_entropy(model(inputs), targets, reduction="sum")
        (slopes,) = torch.autograd.grad(loss, inputs, create_graph=True)
        penalty = slopes.square().sum()
        optimizer.zero_grad()
        ((loss + PENALTY * penalty) / len(inputs)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
model.eval()
noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(1)).to(images)
with torch.no_grad():
    answers = model((images + 0.4 * noise)[:300]).argmax(1)
right = (answers == classes[:300]).double().mean()
print(f"loss {loss.item() / len(inputs)!r}, penalty {penalty.item() / len(inputs)!r}")
print(f"right {right:.1%} of noisy images that it never saw")
