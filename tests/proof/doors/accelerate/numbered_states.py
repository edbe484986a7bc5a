"""Numbered states in a project folder, curves for TensorBoard, a best score that is registered with them.

python numbered_states.py [--resume]
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sines(Dataset):
    def __init__(self, count):
        self.t = torch.linspace(0, 20, count)

    def __len__(self):
        return len(self.t)

    def __getitem__(self, i):
        window = torch.sin(self.t[i] + torch.arange(9) * 0.3)
        return {"x": window[:8, None], "y": window[8:], "name": f"row {i}"}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 12, num_layers=2, dropout=0.2, batch_first=True)
        self.out = nn.Linear(12, 1)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


class Best:
    def __init__(self):
        self.score, self.epoch = 1e9, -1

    def state_dict(self):
        return {"score": self.score, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.score, self.epoch = state["score"], state["epoch"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    config = ProjectConfiguration("project", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=config, log_with="tensorboard")
    set_seed(5)
    model = Recurrent()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)
    train = DataLoader(Sines(70), batch_size=6, shuffle=True)
    held = DataLoader(Sines(25), batch_size=6)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [20, 40], gamma=0.3)
    model, optimizer, train, held, schedule = accelerator.prepare(
        model, optimizer, train, held, schedule
    )
    best = Best()
    accelerator.register_for_checkpointing(best)
    accelerator.init_trackers("sines", config={"lr": 3e-3, "epochs": 3})
    first = 0
    if args.resume:
        accelerator.load_state("project/checkpoints/checkpoint_3")
        first = 4
        config.iteration = 5
        accelerator.print(f"best so far {best.score} in epoch {best.epoch}")
    for epoch in range(first, 5):
        model.train()
        for batch in train:
            loss = nn.functional.huber_loss(model(batch["x"]), batch["y"])
            accelerator.backward(loss)
            accelerator.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        losses, names = [], []
        for batch in held:
            with torch.no_grad():
                one = (model(batch["x"]) - batch["y"]).abs()
            losses.append(accelerator.gather_for_metrics(one))
            names += accelerator.gather_for_metrics(batch["name"])
        score = torch.cat(losses).mean().item()
        if score < best.score:
            best.score, best.epoch = score, epoch
        accelerator.log({"held": score, "lr": schedule.get_last_lr()[0]}, step=epoch)
        accelerator.print(
            f"epoch {epoch} held {score} of {len(names)}: {names[-1]}, {len(set(names))}"
        )
        accelerator.save_state()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.print(f"states {len(list(Path('project/checkpoints').iterdir()))}")
    accelerator.save(model.state_dict(), "project/last.safetensors", safe_serialization=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
