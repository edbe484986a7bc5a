"""A language model under ZeRO 2: accumulation, a rate that decays, perplexity over ranks, weights for elsewhere.

python zero2_lm.py [--resume]
"""

import argparse
import math
import os

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(30, 16), nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 30)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


class Rows(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        draws = torch.Generator().manual_seed(seed)
        start = torch.randint(0, 30, (count, 1), generator=draws)
        self.ids = (start + torch.arange(9) * (1 + start % 3)) % 30

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i]}


def print_rank_0(message):
    if dist.get_rank() == 0:
        print(message)


def get_all_reduce_mean(tensor):
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor / dist.get_world_size()


def loss_of(model, batch):
    ids = batch["input_ids"]
    scores = model(ids[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())


def evaluation(model, loader):
    model.eval()
    losses = 0.0
    for batch in loader:
        with torch.no_grad():
            losses += loss_of(model, batch).float()
    losses = get_all_reduce_mean(losses / len(loader))
    model.train()
    return math.exp(losses.item()), losses.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="lm")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(4)
    model = Recurrent()
    train, held = Rows(64, 0), Rows(24, 1)
    train_sampler = DistributedSampler(train)
    train_dataloader = DataLoader(train, sampler=train_sampler, batch_size=4)
    eval_dataloader = DataLoader(
        held, sampler=DistributedSampler(held, shuffle=False), batch_size=4
    )
    updates = 3 * len(train_dataloader) // 2
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3, "total_num_steps": updates},
        },
        "zero_optimization": {"stage": 2},
    }
    model, optimizer, _, lr_scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    first = 0
    if args.resume:
        _, state = model.load_checkpoint(args.output_dir, tag="epoch-1")
        first = state["epoch"] + 1
        print_rank_0(f"ppl, loss {evaluation(model, eval_dataloader)}")
    for epoch in range(first, 3):
        train_sampler.set_epoch(epoch)
        for step, batch in enumerate(train_dataloader):
            loss = loss_of(model, batch)
            model.backward(loss)
            model.step()
            if model.is_gradient_accumulation_boundary() and step % 3 == 0:
                print_rank_0(f"{epoch} {step} {get_all_reduce_mean(loss.detach()).item()}")
        print_rank_0(
            f"ppl, loss {evaluation(model, eval_dataloader)} lr {lr_scheduler.get_last_lr()}"
        )
        model.tput_timer.update_epoch_count()
        model.save_checkpoint(args.output_dir, tag=f"epoch-{epoch}", client_state={"epoch": epoch})
    model.save_16bit_model(os.path.join(args.output_dir, "weights"))
    if dist.get_rank() == 0:
        raw = getattr(model, "module", model)
        torch.save(raw.state_dict(), os.path.join(args.output_dir, "raw.bin"))
    dist.barrier()


if __name__ == "__main__":
    main()
