"""A small net learns digits from a larger one's answers, and from the few labels that there are.

Shows: a loop with its passes written out; two losses with counts of their own (every image has an
answer of the teacher, one in ten a label), each divided by its count over all ranks.
Start: python examples/distillation.py [FOLDER], and again to go on where it was
   or: python -m torch.distributed.run --nproc-per-node 2 examples/distillation.py [FOLDER]
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import shoal

DOUBLE = "--float64" in sys.argv  # to compare layouts to the last digits
EPOCHS, NO_LABEL = 2 if "--short" in sys.argv else 6, -100
folder = next((arg for arg in sys.argv[1:] if not arg.startswith("--")), "runs/distillation")


def net(width: int) -> nn.Module:
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.GELU(), nn.Linear(width, 10))
    return layers.double() if DOUBLE else layers


def labelled(targets: torch.Tensor) -> torch.Tensor:
    return (targets != NO_LABEL).sum()


images, classes = map(torch.from_numpy, load_digits(return_X_y=True))
images = images / 16 if DOUBLE else (images / 16).float()
few = torch.where(torch.arange(len(classes)) % 10 == 0, classes, NO_LABEL)
data = torch.utils.data.TensorDataset(images[300:], few[300:])
torch.manual_seed(0)
teacher, student = net(256), net(32)
adam = torch.optim.Adam(teacher.parameters(), lr=3e-3)
for _ in range(60):  # every process teaches the same teacher
    adam.zero_grad()
    F.cross_entropy(teacher(images[300:]), classes[300:]).backward()
    adam.step()
teacher.requires_grad_(False)
adam = torch.optim.AdamW(student.parameters(), lr=1e-2)
run = shoal.parallelize(student, adam, batch=64, folder=folder)
run.restore()
for _epoch in run.epochs(EPOCHS):
    for batch in run.loader(data):
        answers = run.total(sum(len(targets) for _, targets in batch.values))
        labels = max(1, run.total(sum(labelled(targets) for _, targets in batch.values)))
        for micro in run.micro_batches(batch):
            logits, taught = run.model(micro.inputs), teacher(micro.inputs)
            soft = F.kl_div(logits.log_softmax(1), taught.softmax(1), reduction="sum")
            hard = F.cross_entropy(logits, micro.targets, ignore_index=NO_LABEL, reduction="sum")
            run.backward(soft / answers + hard / labels)
        result = run.update()
    run.save()
right = (student(images[:300]).argmax(1) == classes[:300]).double().mean()
run.print(f"loss {result.loss!r}, right {right:.1%} of images that nobody has shown it")
run.close()
