"""A denoiser with a moving average: hooks on states, a limit on how many stay, a resume from the latest.

python diffusion_ema.py [--resume_from_checkpoint latest]
"""

import argparse
import copy
import logging
import math
import os
import shutil

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

logger = get_logger(__name__, log_level="INFO")


class EMA:
    def __init__(self, model, decay=0.9):
        self.decay, self.step = decay, 0
        self.shadow = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self, parameters):
        self.step += 1
        for mine, theirs in zip(self.shadow, parameters, strict=True):
            mine.lerp_(theirs.detach(), 1 - self.decay)

    def copy_to(self, parameters):
        for mine, theirs in zip(self.shadow, parameters, strict=True):
            theirs.data.copy_(mine)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(10, 16)
        self.first, self.middle, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, noisy, timesteps):
        x = self.norm(self.first(noisy) + self.time(timesteps))
        return self.last(F.silu(self.middle(F.silu(x))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="denoiser")
    parser.add_argument("--max_train_steps", type=int, default=14)
    parser.add_argument("--checkpointing_steps", type=int, default=4)
    parser.add_argument("--checkpoints_total_limit", type=int, default=2)
    parser.add_argument("--resume_from_checkpoint", default=None)
    args = parser.parse_args()
    config = ProjectConfiguration(
        project_dir=args.output_dir, logging_dir=os.path.join(args.output_dir, "logs")
    )
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision="no", project_config=config
    )
    logging.basicConfig(level=logging.ERROR)
    set_seed(3)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    unet = Denoiser()
    ema = EMA(unet)

    def save_model_hook(models, weights, output_dir):
        if accelerator.is_main_process:
            torch.save({"shadow": ema.shadow, "step": ema.step}, os.path.join(output_dir, "ema.pt"))

    def load_model_hook(models, input_dir):
        kept = torch.load(os.path.join(input_dir, "ema.pt"), weights_only=True)
        ema.shadow, ema.step = kept["shadow"], kept["step"]

    accelerator.register_save_state_pre_hook(save_model_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-2, weight_decay=1e-2)
    draws = torch.Generator().manual_seed(0)
    train_dataset = TensorDataset(torch.randn(62, 8, generator=draws).cumsum(1))
    train_dataloader = DataLoader(train_dataset, shuffle=True, batch_size=4, num_workers=0)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=args.max_train_steps * accelerator.num_processes
    )
    unet, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        unet, optimizer, train_dataloader, lr_scheduler
    )
    per_epoch = math.ceil(len(train_dataloader) / accelerator.gradient_accumulation_steps)
    num_train_epochs = math.ceil(args.max_train_steps / per_epoch)
    if accelerator.is_main_process:
        accelerator.init_trackers("text2image", {k: str(v) for k, v in vars(args).items()})
    global_step = first_epoch = 0
    if args.resume_from_checkpoint:
        dirs = [d for d in os.listdir(args.output_dir) if d.startswith("checkpoint")]
        path = sorted(dirs, key=lambda x: int(x.split("-")[1]))[-1]
        accelerator.print(f"Resuming from checkpoint {path} of {len(dirs)}")
        accelerator.load_state(os.path.join(args.output_dir, path))
        global_step = int(path.split("-")[1])
        first_epoch = global_step // per_epoch
    bar = tqdm(range(args.max_train_steps), disable=True, initial=global_step)
    for _epoch in range(first_epoch, num_train_epochs):
        train_loss = 0.0
        for (latents,) in train_dataloader:
            with accelerator.accumulate(unet):
                noise = torch.randn_like(latents)
                timesteps = torch.randint(0, 10, (len(latents),), device=latents.device).long()
                noisy = latents + noise * (timesteps[:, None] / 10)
                loss = F.mse_loss(unet(noisy, timesteps).float(), noise.float(), reduction="mean")
                avg_loss = accelerator.gather(loss.repeat(4)).mean()
                train_loss += avg_loss.item() / accelerator.gradient_accumulation_steps
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.update(unet.parameters())
                bar.update(1)
                global_step += 1
                accelerator.log({"train_loss": train_loss}, step=global_step)
                accelerator.print(f"step {global_step} {train_loss}")
                train_loss = 0.0
                if global_step % args.checkpointing_steps == 0:
                    if accelerator.is_main_process:
                        kept = [
                            d for d in os.listdir(args.output_dir) if d.startswith("checkpoint")
                        ]
                        kept = sorted(kept, key=lambda x: int(x.split("-")[1]))
                        for one in kept[: len(kept) - args.checkpoints_total_limit + 1]:
                            shutil.rmtree(os.path.join(args.output_dir, one))
                    save_path = os.path.join(args.output_dir, f"checkpoint-{global_step}")
                    accelerator.save_state(save_path)
            if global_step >= args.max_train_steps:
                break
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        final = copy.deepcopy(accelerator.unwrap_model(unet))
        ema.copy_to(final.parameters())
        torch.save(final.state_dict(), os.path.join(args.output_dir, "unet.pt"))
        torch.manual_seed(9)
        sample = torch.randn(4, 8)
        with torch.inference_mode():
            for t in reversed(range(10)):
                sample = sample - 0.1 * final(sample, torch.full((4,), t))
        accelerator.print(f"sample {sample.abs().mean().item()}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
