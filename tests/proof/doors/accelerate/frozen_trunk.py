"""A frozen trunk with BatchNorm, then a whole fine-tuning: groups with rates of their own, objects gathered.

python frozen_trunk.py [--resume FOLDER]
"""

import argparse
import json
import os

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv1d(1, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(),
            nn.Conv1d(6, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(),
        )  # fmt: skip
        self.boxes, self.classes = nn.Linear(6 * 8, 2), nn.Linear(6 * 8, 3)

    def forward(self, x, boxes=None, labels=None):
        features = self.trunk(x).flatten(1)
        found, scores = self.boxes(features), self.classes(features)
        if boxes is None:
            return found, scores
        return {
            "boxes": nn.functional.smooth_l1_loss(found, boxes),
            "classes": nn.functional.cross_entropy(scores, labels),
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(17)
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(83, 1, 8, generator=draws)
    boxes = torch.stack([x.amin((1, 2)), x.amax((1, 2))], 1)
    data = TensorDataset(x, boxes, x[:, 0].argmax(1) % 3)

    @find_executable_batch_size(starting_batch_size=6)
    def train(batch_size):
        accelerator.free_memory()
        set_seed(17)
        model = Detector()
        for p in model.trunk.parameters():
            p.requires_grad = False
        loader = DataLoader(data, batch_size=batch_size, shuffle=True)
        test = DataLoader(data, batch_size=batch_size)
        optimizer = torch.optim.AdamW(
            [{"params": model.boxes.parameters(), "lr": 5e-3},
             {"params": model.classes.parameters(), "lr": 2e-2, "weight_decay": 0.1}]
        )  # fmt: skip
        model, optimizer, loader, test = accelerator.prepare(model, optimizer, loader, test)
        first = 0
        if args.resume:
            accelerator.load_state(args.resume)
            first = int(args.resume.split("_")[-1]) + 1
        for epoch in range(first, 4):
            model.train()
            sums = {}
            for inputs, wanted, labels in loader:
                losses = model(inputs, boxes=wanted, labels=labels)
                accelerator.backward(sum(losses.values()))
                optimizer.step()
                optimizer.zero_grad()
                for name, one in losses.items():
                    sums[name] = (
                        sums.get(name, 0.0) + accelerator.gather(one.detach()).mean().item()
                    )
            accelerator.print(f"epoch {epoch} {sums['boxes']} {sums['classes']}")
            model.eval()
            rows = []
            for inputs, _, labels in test:
                with torch.no_grad():
                    scores = model(inputs)[1]
                mine = [
                    {"label": int(a), "score": float(b.max())}
                    for a, b in zip(labels, scores.softmax(-1), strict=True)
                ]
                rows += accelerator.gather_for_metrics(mine, use_gather_object=True)
            mean = sum(one["score"] for one in rows) / len(rows)
            running = accelerator.unwrap_model(model).trunk[1].running_mean[0]
            accelerator.print(f"rows {len(rows)} score {mean} running {running}")
            accelerator.save_state(f"detector/state_{epoch}")
        return model

    model = train()
    accelerator.wait_for_everyone()
    os.makedirs("detector/final", exist_ok=True)
    accelerator.save(accelerator.get_state_dict(model), "detector/final/weights.pth")
    if accelerator.is_local_main_process:
        with open("detector/final/classes.json", "w") as file:
            json.dump(["a", "b", "c"], file)


if __name__ == "__main__":
    main()
