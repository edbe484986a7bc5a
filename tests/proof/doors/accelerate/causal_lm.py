"""A causal language model without a Trainer: accumulation, a state every few steps, a resume inside an epoch.

python causal_lm.py [--resume_from_checkpoint FOLDER]
"""

import argparse
import json
import math
import os

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

logger = get_logger(__name__)


class Blocks(Dataset):
    def __init__(self, count, seed):
        draws = torch.Generator().manual_seed(seed)
        starts = torch.randint(0, 32, (count, 1), generator=draws)
        self.ids = (
            starts + torch.arange(12) * torch.randint(1, 4, (count, 1), generator=draws)
        ) % 32

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index].clone()}


class LanguageModel(nn.Module):
    def __init__(self, vocab=32, width=24):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 48, 0.1, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids, labels=None):
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        x = self.wte(input_ids)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits = self.lm_head(self.norm(x))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="lm")
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--checkpointing_steps", default="5")
    parser.add_argument("--resume_from_checkpoint", default=None)
    args = parser.parse_args()
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps
    )
    logger.info(accelerator.state, main_process_only=False)
    set_seed(7)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()
    with accelerator.main_process_first():
        train_dataset, eval_dataset = Blocks(90, 0), Blocks(21, 1)
    model = LanguageModel()
    train_dataloader = DataLoader(train_dataset, shuffle=True, batch_size=4)
    eval_dataloader = DataLoader(eval_dataset, batch_size=4)
    no_decay = ["bias", "norm"]
    grouped = [
        {"params": [p for n, p in model.named_parameters() if not any(w in n for w in no_decay)],
         "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if any(w in n for w in no_decay)],
         "weight_decay": 0.0},
    ]  # fmt: skip
    optimizer = torch.optim.AdamW(grouped, lr=5e-3)
    per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    max_train_steps = args.num_train_epochs * per_epoch

    def rate(step, warm=4 * accelerator.num_processes, last=max_train_steps):
        return step / warm if step < warm else max(0.0, (last - step) / max(1, last - warm))

    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    max_train_steps = args.num_train_epochs * per_epoch
    completed_steps, starting_epoch, resume_step = 0, 0, None
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        found = int(os.path.basename(args.resume_from_checkpoint).replace("step_", ""))
        resume_step = found * args.gradient_accumulation_steps
        starting_epoch = resume_step // len(train_dataloader)
        completed_steps = resume_step // args.gradient_accumulation_steps
        resume_step -= starting_epoch * len(train_dataloader)

    for epoch in range(starting_epoch, args.num_train_epochs):
        model.train()
        active_dataloader = train_dataloader
        if args.resume_from_checkpoint and epoch == starting_epoch and resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        for batch in active_dataloader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed_steps += 1
                mean = accelerator.reduce(loss.detach(), "mean").item()
                accelerator.print(f"step {completed_steps} {mean} {float(norm)}")
                accelerator.print(f"lr {lr_scheduler.get_last_lr()[0]}")
                if completed_steps % int(args.checkpointing_steps) == 0:
                    accelerator.save_state(os.path.join(args.output_dir, f"step_{completed_steps}"))
            if completed_steps >= max_train_steps:
                break
        model.eval()
        losses = []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            repeated = outputs["loss"].repeat(len(batch["input_ids"]))
            losses.append(accelerator.gather_for_metrics(repeated))
        losses = torch.cat(losses)
        eval_loss = torch.mean(losses).item()
        accelerator.print(f"epoch {epoch}: perplexity {math.exp(eval_loss)} of {len(losses)}")

    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model)
    accelerator.save(
        unwrapped_model.state_dict(), os.path.join(args.output_dir, "pytorch_model.bin")
    )
    if accelerator.is_main_process:
        with open(os.path.join(args.output_dir, "all_results.json"), "w") as f:
            json.dump({"perplexity": math.exp(eval_loss)}, f)
    accelerator.end_training()


if __name__ == "__main__":
    main()
