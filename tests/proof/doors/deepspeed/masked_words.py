"""Masked words: a folder of states by step, the newest one found by the script, logs as JSON lines.

python masked_words.py [--load_checkpoint_dir DIR]
"""

import argparse
import json
import pathlib

import deepspeed
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, vocab=40, width=16):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(10, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab)

    def forward(self, src_tokens, attention_mask, tgt_tokens):
        x = self.tokens(src_tokens) + self.places(torch.arange(src_tokens.shape[1]))
        scores = self.head(self.encoder(x, src_key_padding_mask=~attention_mask))
        return nn.functional.cross_entropy(scores.flatten(0, 1), tgt_tokens.flatten())


def masked(seed):
    draws = torch.Generator().manual_seed(seed)
    while True:
        wanted = torch.randint(2, 40, (4, 10), generator=draws)
        wanted[:, 5:] = wanted[:, :5]
        hidden = torch.rand(4, 10, generator=draws) < 0.2
        hidden[:, 0] = True
        lengths = torch.randint(6, 11, (4,), generator=draws)
        there = torch.arange(10)[None] < lengths[:, None]
        targets = wanted.masked_fill(~(hidden & there), -100)
        yield {
            "src_tokens": wanted.masked_fill(hidden, 1),
            "attention_mask": there,
            "tgt_tokens": targets,
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint_dir", default="experiments")
    parser.add_argument("--load_checkpoint_dir", default=None)
    parser.add_argument("--num_iterations", type=int, default=9)
    parser.add_argument("--checkpoint_every", type=int, default=4)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    deepspeed.init_distributed()
    rank = torch.distributed.get_rank()
    torch.manual_seed(1)
    model = Encoder()
    ds_config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
    }
    model, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ds_config
    )
    exp_dir, start_step = pathlib.Path(args.checkpoint_dir), 1
    if args.load_checkpoint_dir is not None:
        exp_dir = pathlib.Path(args.load_checkpoint_dir)
        _, client_state = model.load_checkpoint(load_dir=args.load_checkpoint_dir)
        start_step = client_state["checkpoint_step"] + 1
    if rank == 0:
        exp_dir.mkdir(exist_ok=True, parents=True)
        (exp_dir / "hparams.json").write_text(json.dumps({"num_iterations": args.num_iterations}))
    torch.distributed.barrier()
    batches, losses = masked(10 + rank), []
    for _ in range(start_step - 1):
        next(batches)
    model.train()
    for step in range(start_step, start_step + args.num_iterations):
        loss = model(**next(batches))
        model.backward(loss)
        model.step()
        losses.append(loss.item())
        if step % 2 == 0 and rank == 0:
            print(f"step {step} loss {loss.item()} norm {float(model.get_global_grad_norm())}")
            with open(exp_dir / "log.jsonl", "a") as file:
                file.write(json.dumps({"step": step, "loss": sum(losses) / len(losses)}) + "\n")
        if step % args.checkpoint_every == 0:
            model.save_checkpoint(save_dir=str(exp_dir), client_state={"checkpoint_step": step})
    model.save_checkpoint(save_dir=str(exp_dir), client_state={"checkpoint_step": step})
    if rank == 0:
        newest = (exp_dir / "latest").read_text().strip()
        kept = sorted(one.name for one in exp_dir.iterdir() if one.name.startswith("global_step"))
        print(f"latest {newest}: {(exp_dir / newest).is_dir()} of {', '.join(kept)}")


if __name__ == "__main__":
    main()
