"""Image classes by a CNN with BatchNorm: a state after each epoch, and a one-cycle schedule.

python image_classes.py [--resume_from_checkpoint FOLDER]
"""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset


def get_dataloaders(batch_size):
    draws = torch.Generator().manual_seed(0)
    images = torch.randn(152, 3, 8, 8, generator=draws)
    labels = (images[:, 0, :4].mean((1, 2)) > 0).long() + (images[:, 1, :, 4:].mean((1, 2)) > 0)
    train, held = (
        TensorDataset(images[:104], labels[:104]),
        TensorDataset(images[104:], labels[104:]),
    )
    return (
        DataLoader(train, shuffle=True, batch_size=batch_size),
        DataLoader(held, shuffle=False, batch_size=batch_size),
    )


def build():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        nn.Dropout(0.1), nn.Linear(128, 3),
    )  # fmt: skip


def training_function(args):
    accelerator = Accelerator(cpu=True, project_dir=args.output_dir)
    set_seed(42)
    train_dataloader, eval_dataloader = get_dataloaders(batch_size=8)
    model = build()
    model = model.to(accelerator.device)
    mean = torch.tensor([0.1, 0.0, -0.1])[None, :, None, None].to(accelerator.device)
    optimizer = torch.optim.Adam(params=model.parameters(), lr=0.01 / 25)
    lr_scheduler = OneCycleLR(
        optimizer=optimizer, max_lr=0.01, epochs=args.epochs, steps_per_epoch=len(train_dataloader)
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    overall_step, starting_epoch = 0, 0
    if args.resume_from_checkpoint:
        accelerator.print(f"Resumed from checkpoint: {args.resume_from_checkpoint}")
        accelerator.load_state(args.resume_from_checkpoint)
        path = os.path.basename(args.resume_from_checkpoint)
        starting_epoch = int(os.path.splitext(path)[0].replace("epoch_", "")) + 1
        overall_step = starting_epoch * len(train_dataloader)

    for epoch in range(starting_epoch, args.epochs):
        model.train()
        total_loss = 0.0
        for batch in train_dataloader:
            inputs, labels = (one.to(accelerator.device) for one in batch)
            outputs = model(inputs - mean)
            loss = nn.functional.cross_entropy(outputs, labels)
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
        model.eval()
        accurate, num_elems, held_loss = 0, 0, 0.0
        for inputs, labels in eval_dataloader:
            with torch.no_grad():
                outputs = model(inputs - mean)
            predictions, references = accelerator.gather_for_metrics((outputs.argmax(-1), labels))
            losses = nn.functional.cross_entropy(outputs, labels, reduction="none")
            held_loss += accelerator.gather_for_metrics(losses).sum().item()
            accurate += (predictions == references).long().sum().item()
            num_elems += len(references)
        accelerator.print(f"epoch {epoch}: accuracy {100 * accurate / num_elems:.2f}")
        accelerator.print(f"held {held_loss / num_elems} of {num_elems}, step {overall_step}")
        accelerator.print(f"train_loss {total_loss.item() / len(train_dataloader)}")
        accelerator.print(f"lr {lr_scheduler.get_last_lr()[0]}")
        output_dir = os.path.join(args.output_dir, f"epoch_{epoch}")
        accelerator.save_state(output_dir)

    accelerator.wait_for_everyone()
    accelerator.save_model(model, os.path.join(args.output_dir, "final"))
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--resume_from_checkpoint", default=None)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
