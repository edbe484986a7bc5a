"""A script in DeepSpeed's calls that takes a step whenever `beside_deepspeed.py` tells it to.

python steps_of_deepspeed.py '{"stage": 2, …}'        with DeepSpeed itself
python -m shoal run --as deepspeed -- steps_of_deepspeed.py '{"stage": 2, …}'

A line on standard input is a step; its answer is a line of JSON: loss, wall-clock and CPU seconds.
"""

import json
import os
import resource
import sys
import time

import deepspeed
import psutil
import torch
import torch.distributed as dist
from plain_llama import PlainLlama

JOB = json.loads(sys.argv[1])


def resident():
    return psutil.Process().memory_info().rss


def main():
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    before = resident()
    torch.manual_seed(0)
    model = PlainLlama(**JOB["model"])
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.02)
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=JOB["config"]
    )
    draws = torch.Generator().manual_seed(100 + dist.get_rank())
    size = (JOB["config"]["train_micro_batch_size_per_gpu"], JOB["sequence"] + 1)
    top = JOB["model"]["vocabulary"]
    batches = [torch.randint(0, top, size, generator=draws) for _ in range(8)]
    answer({"ready": True})
    step = 0
    for _ in sys.stdin:
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        losses = []
        for _ in range(engine.gradient_accumulation_steps()):
            ids = batches[step % len(batches)]
            step += 1
            logits = engine(ids[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answer({"losses": losses, "wall": wall, "cpu": cpu, "peak": peak, "before": before})
    os._exit(0)


def answer(told):
    os.write(3, (json.dumps(told) + "\n").encode())


if __name__ == "__main__":
    main()
