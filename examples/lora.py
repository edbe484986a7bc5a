"""A tiny Llama of transformers: pretrained on sums, exported, tuned by LoRA on products, asked.

Start: python examples/lora.py pretrain [FOLDER], with FOLDER = runs/lora
       shoal checkpoint export FOLDER/pretrained FOLDER/base
       python examples/lora.py tune [FOLDER], again: it goes on, also on others
   or: python -m torch.distributed.run --nproc-per-node 2 examples/lora.py tune [FOLDER]
       shoal checkpoint export FOLDER/tuned FOLDER/adapter --adapter
       python examples/lora.py sample [FOLDER]
"""

import os
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import shoal

do, folder = [arg for arg in [*sys.argv[1:], "runs/lora"] if not arg.startswith("--")][:2]
dtype = torch.float64 if "--float64" in sys.argv else torch.float32  # to compare layouts
EPOCHS, PAIRS = 1 if "--short" in sys.argv else 20, [divmod(n, 12) for n in range(144)]


def train(model, lines, name, lr):  # a token per letter; spaces, 32, do not count
    rows = torch.tensor([[*f"{line}#".ljust(14).encode()] for line in lines])
    data = torch.utils.data.TensorDataset(rows[:, :-1], rows.where(rows != 32, -100)[:, 1:])
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=lr)
    layout = "fsdp" if "WORLD_SIZE" in os.environ else "single"
    run = shoal.parallelize(model, optimizer, layout=layout, batch=16, folder=f"{folder}/{name}")
    run.restore()
    for _epoch in run.epochs(EPOCHS):
        for batch in run.loader(data):
            run.step(batch)
        run.save()
    run.print(f"step {run.step_count}: loss {run.evaluate(data)['loss']!r}")
    run.close()


torch.manual_seed(0)
if do == "pretrain":
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
    lines = [f"{a} + {b} = {a + b}" for a, b in PAIRS]
    train(LlamaForCausalLM(config).to(dtype), lines, "pretrained", 3e-3)
elif do == "tune":
    base = AutoModelForCausalLM.from_pretrained(f"{folder}/base", dtype=dtype)
    adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    lines = [f"{a} * {b} = {a * b}" for a, b in PAIRS]
    train(get_peft_model(base, adapters), lines, "tuned", 4e-3)
else:
    base = AutoModelForCausalLM.from_pretrained(f"{folder}/base")
    model = PeftModel.from_pretrained(base, f"{folder}/adapter").eval()
    asked = torch.tensor([[*b"3 * 4 ="]])
    print(bytes(model.generate(input_ids=asked, max_new_tokens=4, do_sample=False)[0]).decode())
