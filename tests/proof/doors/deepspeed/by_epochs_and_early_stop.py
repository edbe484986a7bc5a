"""A repeated loader, an early stop that all ranks take, settings asked of the engine, a file of the config.

python by_epochs_and_early_stop.py --deepspeed_config FILE [--resume]
"""

import argparse
import json
import os

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import RepeatingLoader, log_dist, logger
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CONFIG = {
    "train_batch_size": 24,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.5,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 4e-3, "weight_decay": 0.01, "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 20, "warmup_num_steps": 4},
    },
    "zero_optimization": {"stage": 2, "contiguous_gradients": True, "overlap_comm": False},
    "csv_monitor": {"enabled": True, "output_path": "curves", "job_name": "tabular"},
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed()
    rank = dist.get_rank()
    if rank == 0 and not os.path.exists(args.deepspeed_config):
        with open(args.deepspeed_config, "w") as file:
            json.dump(CONFIG, file)
    dist.barrier()
    torch.manual_seed(6)
    model = nn.Sequential(
        nn.Linear(8, 24), nn.SiLU(), nn.Linear(24, 24), nn.SiLU(), nn.Linear(24, 1)
    )
    engine, optimizer, _, schedule = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters()
    )
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(120, 8, generator=draws)
    y = x.square().mean(1, keepdim=True)
    data = TensorDataset(x, y)
    micro = engine.train_micro_batch_size_per_gpu()
    loader = DataLoader(
        torch.utils.data.Subset(data, range(96)), batch_size=micro,
        sampler=DistributedSampler(range(96), shuffle=False),
    )  # fmt: skip
    batches = iter(RepeatingLoader(loader))
    log_dist(f"accumulation {engine.gradient_accumulation_steps()}", ranks=[0])
    logger.info("start")
    best, waited, step = 1e9, 0, 0
    if args.resume:
        path, state = engine.load_checkpoint("tabular")
        best, step = state["best"], state["step"]
        if rank == 0:
            print(f"{path} {engine.global_steps} {engine.global_samples} {engine.micro_steps}")
    stop = step + 10
    while step < stop:
        mean = 0.0
        for _ in range(engine.gradient_accumulation_steps()):
            inputs, targets = next(batches)
            loss = nn.functional.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            mean += loss.item() / engine.gradient_accumulation_steps()
            engine.step()
        step += 1
        if step % 5 == 0:
            engine.eval()
            with torch.no_grad():
                held = nn.functional.mse_loss(engine(x[96:]), y[96:]).item()
            engine.train()
            if rank == 0:
                print(
                    f"step {step} {mean} {held} {engine.get_lr()} {engine.get_global_grad_norm()}"
                )
            waited = 0 if held < best else waited + 1
            best = min(best, held)
            engine.save_checkpoint("tabular", client_state={"best": best, "step": step})
        flag = torch.tensor([float(waited > 3)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item():
            break
    weights = engine.module.state_dict()
    if rank == 0:
        print(f"norm {sum(w.square().sum() for w in weights.values()).sqrt().item()}")
        torch.save({"model_state_dict": weights, "best": best}, "tabular.tar")


if __name__ == "__main__":
    main()
