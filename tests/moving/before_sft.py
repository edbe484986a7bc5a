"""Fine-tune a model of transformers on questions and answers, padded, loss on answers only."""

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

EPOCHS = 1 if "--short" in sys.argv else 8
folder = Path(next((arg for arg in sys.argv[1:] if not arg.startswith("--")), "runs/sft"))

questions = folder / "questions.jsonl"
if not questions.exists():
    folder.mkdir(parents=True, exist_ok=True)
    drawn, words = random.Random(0), ["red", "green", "blue", "one", "two", "three", "up", "down"]
    with questions.open("w") as lines:
        for _ in range(600):
            said = drawn.choices(words, k=drawn.randint(1, 6))
            row = {"prompt": f"last of {' '.join(said)}?", "completion": f" {said[-1]}"}
            lines.write(json.dumps(row) + "\n")
rows = [json.loads(line) for line in questions.open()]
train, held_out = torch.utils.data.random_split(rows, [0.9, 0.1])
tokenizer, end = ByteLevelBPETokenizer(), "<|endoftext|>"
texts = (row["prompt"] + row["completion"] for row in train)
tokenizer.train_from_iterator(texts, 300, 0, show_progress=False, special_tokens=[end])


def collate(rows: list[dict[str, str]]) -> dict[str, torch.Tensor]:
    ids, labels = [], []
    for row in rows:
        asked = tokenizer.encode(row["prompt"]).ids
        said = tokenizer.encode(row["completion"] + end).ids
        ids.append(torch.tensor(asked + said))
        labels.append(torch.tensor([-100] * len(asked) + said))
    padded = pad_sequence(ids, batch_first=True, padding_value=tokenizer.token_to_id(end))
    return {"input_ids": padded, "labels": pad_sequence(labels, True, padding_value=-100)}


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=tokenizer.get_vocab_size(),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
)
model = LlamaForCausalLM(config)  # in your script: LlamaForCausalLM.from_pretrained(…)
model = model.double() if "--float64" in sys.argv else model  # to compare layouts
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(train, batch_size=64, shuffle=True, collate_fn=collate)
for _epoch in range(EPOCHS):
    for batch in loader:
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
with torch.no_grad():
    found = model(**collate(list(held_out))).loss
print(f"loss {loss.item()!r}, of answers that it never saw {found.item()!r}")
