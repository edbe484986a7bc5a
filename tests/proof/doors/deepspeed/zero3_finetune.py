"""Fine-tuning under ZeRO 3: weights made in zero.Init, gathered for a file, rebuilt in fp32 at the end.

python zero3_finetune.py [--resume]
"""

import argparse
import json
import os

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 24)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24), nn.GELU()) for _ in range(3)]
        )
        self.head = nn.Linear(24, 3)

    def forward(self, x, labels=None):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        scores = self.head(x)
        if labels is None:
            return scores
        return nn.functional.cross_entropy(scores, labels), scores


def save_zero_three_model(engine, path):
    output_state_dict = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=True):
            whole = parameter.data.cpu()
        if dist.get_rank() == 0:
            output_state_dict[name] = whole
    if dist.get_rank() == 0:
        torch.save(output_state_dict, path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    deepspeed.init_distributed()
    rank = dist.get_rank()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    torch.manual_seed(8)
    model = Classifier()
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(72, 6, generator=draws)
    y = x[:, :3].argmax(1)
    train, held = TensorDataset(x[:56], y[:56]), TensorDataset(x[56:], y[56:])
    sampler = DistributedSampler(train, seed=3)
    loader = DataLoader(train, batch_size=4, sampler=sampler)
    test = DataLoader(held, batch_size=4, sampler=DistributedSampler(held, shuffle=False))
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    first = 0
    if args.resume:
        path, state = engine.load_checkpoint("tuned")
        first = state["epoch"] + 1
        assert path is not None
    for epoch in range(first, first + 2):
        sampler.set_epoch(epoch)
        engine.train()
        for step, (inputs, labels) in enumerate(loader):
            loss, _ = engine(inputs, labels=labels)
            engine.backward(loss)
            engine.step()
            if rank == 0 and step % 2 == 0:
                print(f"{epoch} {step} {loss.item()}")
        engine.eval()
        counts = torch.zeros(2)
        with torch.no_grad():
            for inputs, labels in test:
                counts += torch.tensor([(engine(inputs).argmax(1) == labels).sum(), len(labels)])
        dist.all_reduce(counts)
        if rank == 0:
            print(f"right {counts[0].item()} of {counts[1].item()} at {engine.global_steps}")
        engine.save_checkpoint("tuned", client_state={"epoch": epoch})
    os.makedirs("final", exist_ok=True)
    engine.save_16bit_model("final", "weights.bin")
    save_zero_three_model(engine, "final/gathered.bin")
    dist.barrier()
    if rank == 0:
        whole = get_fp32_state_dict_from_zero_checkpoint("tuned")
        torch.save(dict(whole), "final/fp32.bin")
        with open("final/config.json", "w") as file:
            json.dump({"classes": 3}, file)
        print(f"whole {sum(one.numel() for one in whole.values())}")


if __name__ == "__main__":
    main()
