"""Split batches, a rate that falls on a plateau, sequences padded over processes, a seed for the order.

python split_plateau.py [--resume]
"""

import argparse
import json

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


def collate(rows):
    inputs = pad_sequence([torch.tensor(one) for one in rows], batch_first=True)
    return {"ids": inputs, "lengths": torch.tensor([len(one) for one in rows])}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.out = nn.Linear(8, 2)

    def forward(self, ids, lengths):
        mask = torch.arange(ids.shape[1])[None] < lengths[:, None]
        x = torch.relu(self.conv(self.embed(ids).transpose(1, 2)).transpose(1, 2))
        return self.out(x), mask


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    plugin = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    accelerator = Accelerator(
        cpu=True, dataloader_config=plugin, step_scheduler_with_optimizer=False
    )
    set_seed(13)
    draws = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 9, (77,), generator=draws).tolist()
    rows = [torch.randint(1, 20, (n,), generator=draws).tolist() for n in lengths]
    train = DataLoader(rows[:60], batch_size=8, shuffle=True, collate_fn=collate)
    held = DataLoader(rows[60:], batch_size=8, collate_fn=collate)
    model = Tagger()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    model, optimizer, train, held, schedule = accelerator.prepare(
        model, optimizer, train, held, schedule
    )

    def loss_of(batch):
        scores, mask = model(**batch)
        targets = (batch["ids"] % 2).masked_fill(~mask, -100)
        return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten()), scores

    first = 0
    if args.resume:
        accelerator.load_state("tagger-2")
        with open("tagger-2/epoch.json") as file:
            first = json.load(file)["epoch"] + 1
    for epoch in range(first, 5):
        model.train()
        for batch in train:
            loss, _ = loss_of(batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        total, right, count = 0.0, 0, 0
        with torch.no_grad():
            for batch in held:
                loss, scores = loss_of(batch)
                total += accelerator.reduce(loss, reduction="mean").item()
                found = accelerator.pad_across_processes(scores.argmax(-1), dim=1, pad_index=-1)
                wanted = accelerator.pad_across_processes(batch["ids"], dim=1, pad_index=0)
                found, wanted = accelerator.gather_for_metrics((found, wanted))
                right += ((found == wanted % 2) & (wanted > 0)).sum().item()
                count += (wanted > 0).sum().item()
        schedule.step(total)
        accelerator.print(f"epoch {epoch} held {total} right {right} of {count}")
        accelerator.print(f"lr {optimizer.param_groups[0]['lr']}")
        accelerator.save_state(f"tagger-{epoch}")
        if accelerator.is_main_process:
            with open(f"tagger-{epoch}/epoch.json", "w") as file:
                json.dump({"epoch": epoch}, file)
    accelerator.save_model(model, "tagger-final", safe_serialization=False)


if __name__ == "__main__":
    main()
