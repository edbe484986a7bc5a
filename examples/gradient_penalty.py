"""Digits whose answers change little with their pixels: a penalty on the gradient by the inputs.

Shows: a gradient of a gradient in a loop written out, summed over micro-batches and ranks as any
loss is; the penalty by itself among the step's metrics. Under fsdp and tp one line refuses it.
Start: python examples/gradient_penalty.py [FOLDER], and again to go on where it was
   or: python -m torch.distributed.run --nproc-per-node 2 examples/gradient_penalty.py [FOLDER]
Source: Drucker and Le Cun, Improving generalization performance using double backpropagation, 1992
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import shoal

DOUBLE = "--float64" in sys.argv  # to compare layouts to the last digits
EPOCHS = 4 if "--short" in sys.argv else 12
PENALTY = 0.0 if "--plain" in sys.argv else 0.3
folder = next((arg for arg in sys.argv[1:] if not arg.startswith("--")), "runs/gradient-penalty")

images, classes = map(torch.from_numpy, load_digits(return_X_y=True))
images = images / 16 if DOUBLE else (images / 16).float()
train = torch.utils.data.TensorDataset(images[300:], classes[300:])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Softplus(), nn.Dropout(0.1), nn.Linear(64, 10))
model = model.double() if DOUBLE else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run = shoal.parallelize(model, optimizer, batch=64, clip=1.0, folder=folder)
run.restore()
for _epoch in run.epochs(EPOCHS):
    for batch in run.loader(train):
        for micro in run.micro_batches(batch):
            inputs = micro.inputs.requires_grad_()
            loss = F.cross_entropy(run.model(inputs), micro.targets, reduction="sum")
            (slopes,) = torch.autograd.grad(loss, inputs, create_graph=True)
            penalty = slopes.square().sum()
            run.backward(loss + PENALTY * penalty, len(inputs))
            run.log(penalty=(penalty, len(inputs)))
        result = run.update()
    run.save()
noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(1)).to(images)
answers = run.predict((images + 0.4 * noise)[:300]).argmax(1)
right = (answers == classes[:300]).double().mean()
run.print(f"loss {result.loss!r}, penalty {result.metrics['penalty']!r}")
run.print(f"right {right:.1%} of noisy images that it never saw")
run.close()
