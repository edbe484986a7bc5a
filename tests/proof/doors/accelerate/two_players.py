"""A generator and a discriminator: two prepared models with BatchNorm, two optimizers, samples at the end.

python two_players.py [--resume FOLDER]
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(11)
    draws = torch.Generator().manual_seed(0)
    real = 2 + 0.5 * torch.randn(96, 4, generator=draws)
    loader = DataLoader(TensorDataset(real), batch_size=8, shuffle=True, drop_last=True)
    generator = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    discriminator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    generator, discriminator, optimizer_g, optimizer_d, loader = accelerator.prepare(
        generator, discriminator, optimizer_g, optimizer_d, loader
    )
    criterion = nn.BCEWithLogitsLoss()
    first = 0
    if args.resume:
        accelerator.load_state(args.resume)
        first = int(args.resume.rpartition("-")[2]) + 1
    fixed = torch.randn(5, 3, generator=torch.Generator().manual_seed(5))
    for epoch in range(first, 3):
        generator.train()
        for (images,) in loader:
            ones, zeros = torch.ones(len(images), 1), torch.zeros(len(images), 1)
            noise = torch.randn(len(images), 3)
            optimizer_d.zero_grad()
            fake = generator(noise).detach()
            loss_d = criterion(discriminator(images), ones) + criterion(discriminator(fake), zeros)
            accelerator.backward(loss_d)
            optimizer_d.step()
            optimizer_g.zero_grad()
            loss_g = criterion(discriminator(generator(noise)), ones)
            accelerator.backward(loss_g)
            optimizer_g.step()
        both = accelerator.gather(torch.stack([loss_d.detach(), loss_g.detach()])[None]).mean(0)
        accelerator.print(f"epoch {epoch} d {both[0].item()} g {both[1].item()}")
        generator.eval()
        with torch.no_grad():
            accelerator.print(f"samples {generator(fixed).mean().item()}")
        accelerator.save_state(f"gan-{epoch}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(generator).state_dict(), "netG.pth")
        torch.save(accelerator.unwrap_model(discriminator).state_dict(), "netD.pth")


if __name__ == "__main__":
    main()
