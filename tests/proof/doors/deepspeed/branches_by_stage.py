"""A model of several parts under ZeRO 3, outputs in a dict, buffers, a warm start of some weights.

python branches_by_stage.py [--resume]
"""

import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Twin(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 8))
        self.right = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 8))
        self.scale = nn.Parameter(torch.tensor([1.0]))
        self.register_buffer("shift", torch.full((8,), 0.1))

    def forward(self, batch):
        a = self.left(batch["a"]) + self.shift
        b = self.right(batch["b"])
        return {"similar": self.scale * nn.functional.cosine_similarity(a, b), "a": a}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    deepspeed.init_distributed()
    rank = dist.get_rank()
    torch.manual_seed(9)
    model = Twin()
    warm = {k: v * 0.5 for k, v in model.state_dict().items() if k.startswith("right")}
    missing = model.load_state_dict(warm, strict=False).missing_keys
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 2.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3, "stage3_gather_16bit_weights_on_model_save": True,
            "stage3_param_persistence_threshold": 10,
        },
    }  # fmt: skip
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    draws = torch.Generator().manual_seed(0)
    a = torch.randn(48, 5, generator=draws)
    b = a + 0.5 * torch.randn(48, 5, generator=draws)
    wanted = torch.rand(48, generator=draws).round()
    data = TensorDataset(a, b, wanted)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler)
    first = 0
    if args.resume:
        path, _ = engine.load_checkpoint("twin", load_module_strict=True)
        first = engine.global_steps * 2 // len(loader)
        if rank == 0:
            print(f"at {path}, epoch {first}, missing {len(missing)}")
    for epoch in range(first, first + 2):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for a, b, y in loader:
            found = engine({"a": a, "b": b})
            loss = nn.functional.binary_cross_entropy_with_logits(found["similar"], y)
            loss = loss + 1e-3 * found["a"].square().mean()
            engine.backward(loss)
            engine.step()
            sums += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch} {(sums[0] / sums[1]).item()} skipped {engine.skipped_steps}")
        engine.save_checkpoint("twin")
    state = engine._zero3_consolidated_16bit_state_dict()
    if rank == 0:
        os.makedirs("twin-final", exist_ok=True)
        torch.save(state, "twin-final/model.pt")
        print(f"weights {len(state)} {state['scale'].item()}")
    engine.save_16bit_model("twin-final", "again.pt")


if __name__ == "__main__":
    main()
