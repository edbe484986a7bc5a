"""Fine-tune a model of transformers on questions and answers, packed several to a row.

Shows: jsonl in a loop of one's own; loss on answers only; rows of examples that do not attend to
each other, so that the packed run trains on what the padded one does, in fewer rows.
Start: python examples/sft.py [FOLDER], and again to go on where it was
   or: python -m torch.distributed.run --nproc-per-node 2 examples/sft.py [FOLDER]
"""

import json
import random
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shoal
from shoal.data.sources import open_data

EPOCHS = 1 if "--short" in sys.argv else 8
folder = Path(next((arg for arg in sys.argv[1:] if not arg.startswith("--")), "runs/sft"))

questions = folder / "questions.jsonl"
if not questions.exists():  # the same bytes from every process, in one move
    folder.mkdir(parents=True, exist_ok=True)
    drawn, words = random.Random(0), ["red", "green", "blue", "one", "two", "three", "up", "down"]
    with (fresh := folder / f"questions-{random.SystemRandom().random()}").open("w") as lines:
        for _ in range(600):
            said = drawn.choices(words, k=drawn.randint(1, 6))
            row = {"prompt": f"last of {' '.join(said)}?", "completion": f" {said[-1]}"}
            lines.write(json.dumps(row) + "\n")
    fresh.replace(questions)
data = open_data(
    f"jsonl:{questions}", tokenizer="bpe:300", sequence=64, packing="on", validation=0.1
)

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=data.vocabulary,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
)
model = LlamaForCausalLM(config)  # in your script: LlamaForCausalLM.from_pretrained(…)
model = model.double() if "--float64" in sys.argv else model  # to compare layouts
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run = shoal.parallelize(
    model, optimizer, batch=8, clip=1.0, call="kwargs", folder=folder, tokenizer=data.tokenizer
)
run.restore()
run.print(data.description)
for _epoch in run.epochs(EPOCHS):
    for batch in run.loader(data.train):
        result = run.step(batch)
    run.save()
found = run.evaluate(data.validation)
run.print(f"loss {result.loss!r}, of answers that it never saw {found['loss']!r}")
run.close()
