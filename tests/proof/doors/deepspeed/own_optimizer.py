"""An optimizer and a schedule of the script's own, groups, a frozen part, the best tag tested at the end.

python own_optimizer.py [--resume]
"""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(9, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh())
        self.down, self.up = nn.Linear(20, 4, bias=False), nn.Linear(4, 20, bias=False)
        self.head, self.drop = nn.Linear(20, 1), nn.Dropout(0.1)
        nn.init.zeros_(self.up.weight)
        self.base.requires_grad_(False)

    def forward(self, x):
        x = self.base(x)
        return self.head(x + self.up(self.drop(self.down(x))))[:, 0]


def validate(engine, loader):
    engine.eval()
    sums = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            sums += torch.tensor([(engine(x) - y).abs().sum().item(), len(y)])
    dist.all_reduce(sums)
    engine.train()
    return (sums[0] / sums[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(2)
    model = Adapter()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [{"params": model.head.parameters(), "lr": 1e-2, "weight_decay": 0.0},
         {"params": [model.down.weight, model.up.weight], "lr": 3e-3}]
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 5))
    config = {
        "train_micro_batch_size_per_gpu": 5,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, model_parameters=trained,
        config=config,
    )  # fmt: skip
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(100, 9, generator=draws)
    y = x[:, 0] * x[:, 1]
    train, held = TensorDataset(x[:80], y[:80]), TensorDataset(x[80:], y[80:])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=5, sampler=sampler)
    test = DataLoader(held, batch_size=5, sampler=DistributedSampler(held, shuffle=False))
    first, best = 0, 1e9
    if args.resume:
        _, state = engine.load_checkpoint("adapter", tag="last")
        first, best = state["epoch"] + 1, state["best"]
    torch.manual_seed(100 + engine.global_rank + first)
    for epoch in range(first, first + 3):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = (engine(inputs) - targets).square().mean()
            engine.backward(loss)
            engine.step()
        score = validate(engine, test)
        if engine.global_rank == 0:
            print(f"epoch {epoch} loss {loss.item()} held {score} lr {scheduler.get_last_lr()}")
        state = {"epoch": epoch, "best": min(best, score), "args": args, "lrs": engine.get_lr()}
        if score < best:
            best = score
            engine.save_checkpoint("adapter", tag="best", client_state=state)
        engine.save_checkpoint("adapter", tag="last", client_state=state)
    _, state = engine.load_checkpoint("adapter", tag="best", load_optimizer_states=False)
    if engine.global_rank == 0:
        print(f"best {state['epoch']} {state['args'].resume} {len(state['lrs'])}")
    score = validate(engine, test)
    if engine.global_rank == 0:
        print(f"test {score}")
        torch.save(
            {"adapter": {k: v for k, v in engine.module.state_dict().items() if "base" not in k}},
            "adapter.pt",
        )


if __name__ == "__main__":
    main()
