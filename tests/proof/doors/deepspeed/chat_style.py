"""Supervised fine-tuning as chats' scripts do it: weights and words in a folder, old states deleted.

python chat_style.py [--resume]
"""

import argparse
import json
import math
import os
import shutil

import deepspeed
import torch
from deepspeed import get_accelerator
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

WEIGHTS_NAME, CONFIG_NAME = "pytorch_model.bin", "config.json"


class Chat(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = {"hidden": 20, "vocab": 26}
        self.wte = nn.Embedding(26, 20)
        self.attn = nn.MultiheadAttention(20, 4, batch_first=True)
        self.norm, self.lm_head = nn.LayerNorm(20), nn.Linear(20, 26, bias=False)

    def forward(self, input_ids, labels):
        x = self.wte(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.norm(x + self.attn(x, x, x, attn_mask=mask, need_weights=False)[0])
        scores = self.lm_head(x)[:, :-1]
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten())


def collate(rows):
    ids = torch.tensor(rows)
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}


def rows(count, seed):
    draws = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 26, (count,), generator=draws).tolist()
    return [[(start + i * i) % 26 for i in range(10)] for start in starts]


def to_device(batch, device):
    return {k: v.to(device) for k, v in batch.items()}


def save_hf_format(model, output_dir):
    model_to_save = model.module if hasattr(model, "module") else model
    os.makedirs(output_dir, exist_ok=True)
    save_dict = model_to_save.state_dict()
    for key in list(save_dict.keys()):
        if "lora" in key:
            del save_dict[key]
    torch.save(save_dict, os.path.join(output_dir, WEIGHTS_NAME))
    with open(os.path.join(output_dir, CONFIG_NAME), "w") as file:
        json.dump(model_to_save.config, file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--output_dir", default="sft")
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    if args.local_rank == -1:
        device = torch.device(get_accelerator().device_name())
    else:
        get_accelerator().set_device(args.local_rank)
        device = torch.device(get_accelerator().device_name(), args.local_rank)
    deepspeed.init_distributed()
    args.global_rank = torch.distributed.get_rank()
    ds_config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "none"},
            "stage3_param_persistence_threshold": 1e4,
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
    }
    deepspeed.runtime.utils.set_random_seed(1234) if hasattr(deepspeed, "nothing") else None
    torch.manual_seed(1234)
    torch.distributed.barrier()
    model = Chat()
    train_dataset, eval_dataset = rows(48, 0), rows(16, 1)
    train_sampler = RandomSampler(train_dataset)
    eval_sampler = SequentialSampler(eval_dataset)
    if torch.distributed.get_world_size() > 1:
        train_sampler = DistributedSampler(train_dataset)
        eval_sampler = DistributedSampler(eval_dataset)
    train_dataloader = DataLoader(
        train_dataset, collate_fn=collate, sampler=train_sampler, batch_size=4
    )
    eval_dataloader = DataLoader(
        eval_dataset, collate_fn=collate, sampler=eval_sampler, batch_size=4
    )
    decayed = [p for n, p in model.named_parameters() if "bias" not in n and "norm" not in n]
    others = [p for n, p in model.named_parameters() if "bias" in n or "norm" in n]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=8e-3, betas=(0.9, 0.95),
    )  # fmt: skip
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3)
    model, optimizer, _, lr_scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, args=args, config=ds_config, lr_scheduler=warm,
        dist_init_required=True,
    )  # fmt: skip

    def evaluation():
        model.eval()
        losses = 0.0
        for batch in eval_dataloader:
            with torch.no_grad():
                losses += model(**to_device(batch, device)).float()
        mean = losses / len(eval_dataloader)
        torch.distributed.all_reduce(mean)
        mean /= torch.distributed.get_world_size()
        return math.exp(mean.item()), mean.item()

    first = 0
    if args.resume:
        path, client = model.load_checkpoint(args.output_dir)
        first = client["epoch"] + 1
    for epoch in range(first, first + 3):
        model.train()
        mean_loss = 0
        for batch in train_dataloader:
            loss = model(**to_device(batch, device))
            model.backward(loss)
            model.step()
            mean_loss += loss.item()
        ppl, eval_loss = evaluation()
        if args.global_rank == 0:
            print(f"epoch {epoch} loss {mean_loss / len(train_dataloader)} ppl {ppl} {eval_loss}")
        model.save_checkpoint(args.output_dir, client_state={"epoch": epoch})
        if args.global_rank == 0:
            kept = [d for d in os.listdir(args.output_dir) if d.startswith("global_step")]
            kept.sort(key=lambda d: int(d.removeprefix("global_step")))
            for old in kept[:-2]:
                shutil.rmtree(os.path.join(args.output_dir, old))
            print("kept", *kept[-2:])
        torch.distributed.barrier()
    if args.global_rank == 0:
        save_hf_format(model, os.path.join(args.output_dir, "hf"))


if __name__ == "__main__":
    main()
