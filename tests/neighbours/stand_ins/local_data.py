"""Makes what the neighbours' scripts would fetch: a small BERT, its words, pairs of sentences, images.

python local_data.py FOLDER
"""

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

WORDS = [f"word{index}" for index in range(95)]


def main():
    folder = Path(sys.argv[1])
    draws = random.Random(0)
    pairs = folder / "nyu-mll" / "glue"
    pairs.mkdir(parents=True)
    for split, count in {"train": 96, "validation": 40, "test": 16}.items():
        with (pairs / f"{split}.jsonl").open("w") as file:
            for index in range(count):
                label = draws.randrange(2)
                first = draws.sample(WORDS, draws.randint(4, 12))
                second = first[::-1] if label else draws.sample(WORDS, len(first))
                row = {"sentence1": " ".join(first), "sentence2": " ".join(second)}
                file.write(json.dumps({**row, "label": label, "idx": index}) + "\n")
    files = "\n".join(
        f"  - split: {split}\n    path: {split}.jsonl" for split in ("train", "validation", "test")
    )
    (pairs / "README.md").write_text(
        f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}\n---\n"
    )
    images = folder / "images"
    images.mkdir()
    numbers = np.random.default_rng(0)
    for index in range(400):
        kind = index % 4
        pixels = numbers.integers(0, 128, (64, 64, 3)) + 30 * kind
        Image.fromarray(pixels.astype(np.uint8)).save(images / f"kind{kind}_{index}.jpg")
    bert(folder / "bert-base-cased")


def bert(folder):
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    folder.mkdir()
    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(known) + "\n")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(known), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)


if __name__ == "__main__":
    main()
