"""Makes what the neighbours' scripts would fetch: a small BERT and a small Llama, texts, images.

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
    texts(folder / "Salesforce" / "wikitext", draws)
    llama(folder / "HuggingFaceTB" / "SmolLM-360M")
    texts(folder / "wikitext", random.Random(1))  # by its older name
    instructions(folder / "tatsu-lab" / "alpaca", random.Random(2))
    words().save_pretrained(folder / "roberta-base")


def texts(folder, draws):
    """Lines of words, as a data set of the hub in three parts."""
    folder.mkdir(parents=True)
    splits = {"train": 520, "validation": 24, "test": 8}
    for split, count in splits.items():
        with (folder / f"{split}.jsonl").open("w") as file:
            for _ in range(count):
                words = draws.choices(WORDS, k=draws.randint(3, 14))
                file.write(json.dumps({"text": " ".join(words)}) + "\n")
    files = "\n".join(f"  - split: {split}\n    path: {split}.jsonl" for split in splits)
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: wikitext-2-v1\n  data_files:\n{files}\n---\n"
    )


def instructions(folder, draws):
    """Rows of instruction, input and output; every second one has no input."""
    folder.mkdir(parents=True)
    with (folder / "train.jsonl").open("w") as file:
        for index in range(48):
            said = [" ".join(draws.choices(WORDS, k=draws.randint(3, 9))) for _ in range(3)]
            row = dict(zip(("instruction", "input", "output"), said, strict=True))
            file.write(json.dumps(row | ({"input": ""} if index % 2 else {})) + "\n")


def words():
    """A tokenizer of WORDS and RoBERTa's five marks, in its order."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    marks = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    known = {word: index for index, word in enumerate([*marks, *WORDS])}
    plain = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, model_max_length=64, bos_token="<s>", cls_token="<s>",
        eos_token="</s>", sep_token="</s>", pad_token="<pad>", unk_token="<unk>", mask_token="<mask>",
    )  # fmt: skip


def llama(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True)
    known = {word: index for index, word in enumerate(["<unk>", "<end>", *WORDS])}
    plain = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", eos_token="<end>", bos_token="<end>",
        model_max_length=64,
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(known), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


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
