"""A tiny Llama of transformers: pretrained on sums, tuned by LoRA on products, asked."""

import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

do, folder = [arg for arg in [*sys.argv[1:], "runs/lora"] if not arg.startswith("--")][:2]
dtype = torch.float64 if "--float64" in sys.argv else torch.float32  # to compare layouts
EPOCHS, PAIRS = 1 if "--short" in sys.argv else 20, [divmod(n, 12) for n in range(144)]


def train(model, lines, name, lr):  # a token per letter; spaces, 32, do not count
    rows = torch.tensor([[*f"{line}#".ljust(14).encode()] for line in lines])
    data = torch.utils.data.TensorDataset(rows, rows.where(rows != 32, -100))
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=lr)
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    for _epoch in range(EPOCHS):
        for inputs, labels in loader:
            loss = model(inputs, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.save_pretrained(f"{folder}/{name}")
    model.eval()
    with torch.no_grad():
        loss = model(data.tensors[0], labels=data.tensors[1]).loss
    print(f"loss {loss.item()!r}")


torch.manual_seed(0)
if do == "pretrain":
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
    lines = [f"{a} + {b} = {a + b}" for a, b in PAIRS]
    train(LlamaForCausalLM(config).to(dtype), lines, "base", 3e-3)
elif do == "tune":
    base = AutoModelForCausalLM.from_pretrained(f"{folder}/base", dtype=dtype)
    adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    lines = [f"{a} * {b} = {a * b}" for a, b in PAIRS]
    train(get_peft_model(base, adapters), lines, "adapter", 4e-3)
else:
    base = AutoModelForCausalLM.from_pretrained(f"{folder}/base")
    model = PeftModel.from_pretrained(base, f"{folder}/adapter").eval()
    asked = torch.tensor([[*b"3 * 4 ="]])
    print(bytes(model.generate(input_ids=asked, max_new_tokens=4, do_sample=False)[0]).decode())
