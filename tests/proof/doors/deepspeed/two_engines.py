"""A generator and a discriminator, an engine each: three backward passes in a turn, both saved.

python two_engines.py [--resume]
"""

import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
from torch import nn


def weights_init(m):
    if isinstance(m, nn.Linear):
        nn.init.normal_(m.weight, 0.0, 0.2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    deepspeed.init_distributed()
    rank = dist.get_rank()
    torch.manual_seed(3)
    netG = nn.Sequential(
        nn.Linear(4, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6)
    )
    netD = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    netG.apply(weights_init)
    netD.apply(weights_init)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.0,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 2e-3, "betas": [0.5, 0.999], "torch_adam": True, "adam_w_mode": False},
        },
    }
    engine_d, _, _, _ = deepspeed.initialize(
        model=netD, model_parameters=netD.parameters(), config=dict(config)
    )
    engine_g, _, _, _ = deepspeed.initialize(
        model=netG, model_parameters=netG.parameters(), config=dict(config)
    )
    criterion = nn.BCEWithLogitsLoss()
    draws = torch.Generator().manual_seed(40 + rank)
    first = 0
    if args.resume:
        engine_d.load_checkpoint("gan/d")
        _, state = engine_g.load_checkpoint("gan/g")
        first = state["turn"] + 1
    for turn in range(first, first + 8):
        real = 1 + 0.3 * torch.randn(8, 6, generator=draws)
        noise = torch.randn(8, 4, generator=draws)
        ones, zeros = torch.ones(8, 1), torch.zeros(8, 1)
        loss_real = criterion(engine_d(real), ones)
        fake = engine_g(noise)
        loss_fake = criterion(engine_d(fake.detach()), zeros)
        loss_d = loss_real + loss_fake
        engine_d.backward(loss_d)
        engine_d.step()
        loss_g = criterion(engine_d.module(fake), ones)
        engine_g.backward(loss_g)
        engine_g.step()
        engine_d.zero_grad()
        if rank == 0:
            print(f"turn {turn} d {loss_d.item()} g {loss_g.item()}")
    engine_d.save_checkpoint("gan/d", client_state={"turn": turn})
    engine_g.save_checkpoint("gan/g", client_state={"turn": turn})
    engine_g.eval()
    with torch.no_grad():
        shown = engine_g(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)))
    if rank == 0:
        print(f"shown {shown.mean().item()}")
        os.makedirs("gan/final", exist_ok=True)
        torch.save(engine_g.module.state_dict(), "gan/final/netG.pth")
        torch.save(engine_d.module.state_dict(), "gan/final/netD.pth")


if __name__ == "__main__":
    main()
