"""The planner's number of parameters beside that of transformers, for every class with a head.

    every class   of the installed transformers that ends a causal or a conditional language model:
                  its default config.json must be refused by name, or counted as the class counts
                  itself on the meta device, ties once
    every key     of the types that are counted: from two small odd shapes, each key is changed, is
                  left out, and stands under its other name; each number must be equal or refused

`python tests/proof/hf_counts.py [TYPE …]` writes docs/proof/hf-counts.json (of all types only), and
ends with 1 if a number differs. `make proof PART=counts` runs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError
from shoal.planner.hf_config import TYPES, VISION, from_config
from shoal.planner.transformer import model_facts

RESULT = Path(__file__).resolve().parents[2] / "docs" / "proof" / "hf-counts.json"
HEAD = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")
TASKS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM",
         "SPEECH_SEQ_2_SEQ", "VISION_2_SEQ")  # fmt: skip
"""Mappings of transformers whose classes have such a head, whatever they are called."""

Document = dict[str, Any]

ODD: tuple[Document, ...] = (
    {
        "hidden_size": 48, "n_embd": 48, "d_model": 48, "num_attention_heads": 6, "n_head": 6,
        "n_heads": 6, "num_heads": 6, "attention_heads": 6, "num_key_value_heads": 3,
        "num_kv_heads": 3, "head_dim": 10, "intermediate_size": 56, "ffn_dim": 56, "n_inner": 56,
        "ffn_hidden_size": 56, "num_hidden_layers": 5, "n_layer": 5, "n_layers": 5,
        "num_layers": 5, "vocab_size": 101, "num_experts": 6, "num_local_experts": 6,
        "n_routed_experts": 6, "moe_num_experts": 6, "num_experts_per_tok": 2, "moe_k": 2,
        "moe_topk": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28,
        "shared_intermediate_size": 28, "n_shared_experts": 2, "num_shared_experts": 2,
        "moe_num_shared_experts": 2, "first_k_dense_replace": 2, "kv_lora_rank": 12,
        "q_lora_rank": 14, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 10,
        "n_group": 1, "topk_group": 1, "max_position_embeddings": 40, "n_positions": 40,
        "intermediate_size_mlp": 72, "word_embed_proj_dim": 48, "attention_types": [[["global"], 5]],
        "pad_token_id": None,
    },
    {
        "hidden_size": 60, "n_embd": 60, "d_model": 60, "num_attention_heads": 10, "n_head": 10,
        "n_heads": 10, "num_heads": 10, "attention_heads": 10, "num_key_value_heads": 5,
        "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 36, "ffn_dim": 36, "n_inner": 36,
        "ffn_hidden_size": 36, "num_hidden_layers": 7, "n_layer": 7, "n_layers": 7,
        "num_layers": 7, "vocab_size": 67, "num_experts": 9, "num_local_experts": 9,
        "n_routed_experts": 9, "moe_num_experts": 9, "num_experts_per_tok": 3, "moe_k": 3,
        "moe_topk": 3, "moe_intermediate_size": 44, "shared_expert_intermediate_size": 12,
        "shared_intermediate_size": 12, "n_shared_experts": 1, "num_shared_experts": 1,
        "moe_num_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16,
        "q_lora_rank": 10, "qk_rope_head_dim": 6, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "n_group": 1, "topk_group": 1, "max_position_embeddings": 24, "n_positions": 24,
        "intermediate_size_mlp": 28, "word_embed_proj_dim": 60, "attention_types": [[["global"], 7]],
        "pad_token_id": None,
    },
)  # fmt: skip
"""Small shapes in which no two numbers that are multiplied are the same by chance."""

LISTS: dict[str, list[Any]] = {
    "mlp_only_layers": [[1], [0, 3]],
    "moe_layers": [[1, 3], [0]],
    "q_lora_rank": [None],
    "shared_expert_intermediate_size": [16],
    "decoder_sparse_step": [2, 3],
    "interleave_moe_layer_step": [2, 3],
    "moe_layer_interval": [2],
    "moe_layer_start_index": [0, 2],
    "moe_layer_end_index": [3],
    "moe_layer_freq": [2],
    "num_key_value_heads": [1, 2, None],
    "num_kv_heads": [1, 2, None],
    "head_dim": [None, 12],
    "id2label": [{"0": "a", "1": "b", "2": "c"}],
}
"""Values that are tried beside one more, its double and the other truth."""


def class_names() -> list[str]:
    """Names of the classes of transformers with a causal or conditional head, and of images."""
    import transformers
    from transformers.models.auto import modeling_auto

    found = {name for name in dir(transformers) if HEAD.search(name)}
    for task in TASKS:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {})
        for names in mapping.values():
            found.update([names] if isinstance(names, str) else names)
    for row in (*VISION.values(), *(decoder.classes for decoder in TYPES.values())):
        found.update(row.split())
    return sorted(name for name in found if not name.startswith("AutoModel"))


def find_class(name: str) -> Any:
    """The class of transformers that has this name."""
    return getattr(importlib.import_module("transformers"), name)


def count(kind: Any, document: Document) -> int:
    """Parameters of a class built on the meta device from a config.json, ties once."""
    import torch

    config = kind.config_class.from_dict(json.loads(json.dumps(document)))
    with torch.device("meta"):
        model = kind(config)
    return sum(parameter.numel() for parameter in model.parameters())


def planned(document: Document) -> int | str:
    """The planner's number for a config.json, or the line with which it refuses the file."""
    try:
        return model_facts(from_config(document), 64, 2).trainable
    except ConfigError as refusal:
        return str(refusal)


def document_of(kind: Any, config: Any, *, brief: bool = False) -> Document:
    """The config.json that transformers writes; brief: as `save_pretrained` does it."""
    document = json.loads(config.to_json_string(use_diff=brief))
    return {**document, "model_type": config.model_type, "architectures": [kind.__name__]}


def shapes(kind: Any, *, default: bool) -> Iterator[tuple[str, Document]]:
    """The default, and the two small shapes, each in full and as it is saved."""
    own = {field.name for field in dataclasses.fields(kind.config_class)}
    if default:
        yield "default", document_of(kind, kind.config_class())
        yield "default as saved", document_of(kind, kind.config_class(), brief=True)
    for number, odd in enumerate(ODD, 1):
        small = {key: value for key, value in odd.items() if key in own}
        for tied in (True, False):
            with contextlib.suppress(Exception):
                config = kind.config_class(**small, tie_word_embeddings=tied)
                name = f"small {number}{', tied' if tied else ''}"
                yield name, document_of(kind, config)
                yield f"{name}, as saved", document_of(kind, config, brief=True)


def changes(kind: Any, document: Document) -> Iterator[tuple[str, Document]]:
    """One key changed, left out, or under another name, at a time."""
    several = {key for key, value in document.items() if isinstance(value, list)}
    for key, value in document.items():
        if key in ("model_type", "architectures", "transformers_version", "dtype"):
            continue
        rest = {name: other for name, other in document.items() if name != key}
        yield f"{key} left out", rest
        tries = list(LISTS.get(key, []))
        if isinstance(value, bool):
            tries.append(not value)
        elif isinstance(value, int):
            tries += [value + 1, 2 * value]
        elif value is None:
            tries += [1, 2, True]
        elif isinstance(value, list) and {"dense", "sparse"} & set(map(str, value)):
            tries += [["dense"] * len(value), ["sparse", "dense"] * 9, ["dense", "sparse"] * 9]
            tries = [one[: len(value)] for one in tries]
        for other in tries:
            if other != value:
                yield f"{key} = {json.dumps(other)}", {**document, key: other}
                if several and isinstance(value, int):  # lists by block are of the old number
                    kept = {
                        k: v for k, v in document.items() if k not in several - {"architectures"}
                    }
                    yield f"{key} = {json.dumps(other)}, no lists", {**kept, key: other}
    truths = [key for key, value in document.items() if isinstance(value, bool)]
    for one, other in itertools.combinations(truths, 2):
        both = {one: not document[one], other: not document[other]}
        yield f"{json.dumps(both)}", {**document, **both}
    for other, name in (getattr(kind.config_class, "attribute_map", None) or {}).items():
        if name in document:
            rest = {key: value for key, value in document.items() if key != name}
            yield f"{name} as {other}", {**rest, other: document[name]}


def hidden_act(document: Document) -> Iterator[tuple[str, Document]]:
    """The activation's name says nothing of gates."""
    for key in ("hidden_act", "activation_function", "hidden_activation", "activation"):
        if key in document:
            for name in ("gelu", "silu", "relu", "gelu_pytorch_tanh", "gelu_new"):
                yield f"{key} = {name}", {**document, key: name}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what transformers says of odd configurations."""
    from transformers.utils import logging

    logging.set_verbosity(50)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def compare(kind: Any, *, keys: bool, default: bool = True) -> dict[str, Any]:
    """Compare the numbers of one class: how many are equal, refused, and which differ.

    keys     every key is changed and left out as well · default  the default shape is built too
    """
    told: dict[str, Any] = {"equal": 0, "refused": 0, "not built": 0, "differ": []}

    def hold(name: str, document: Document) -> None:
        guess = planned(document)
        if isinstance(guess, str):
            told["refused"] += 1
            return
        try:
            true = count(kind, document)
        except Exception:  # whatever a configuration that cannot be built raises
            told["not built"] += 1
            return
        if true == guess:
            told["equal"] += 1
        else:
            told["differ"].append(f"{name}: {guess} for {true}")

    for name, document in shapes(kind, default=default):
        hold(name, document)
        if keys and name.startswith("small") and "saved" not in name:
            for what, changed in (*changes(kind, document), *hidden_act(document)):
                hold(f"{name}; {what}", changed)
    return told


def is_counted(kind: Any) -> bool:
    """Whether the planner counts this class at all."""
    model_type = kind.config_class.model_type
    row = TYPES[model_type].classes if model_type in TYPES else VISION.get(model_type, "")
    return kind.__name__ in row.split()


def refusal(kind: Any) -> str:
    """The line for a class that is not counted; "" where it is taken all the same."""
    said = planned({"model_type": kind.config_class.model_type, "architectures": [kind.__name__]})
    return said if isinstance(said, str) else ""


def main() -> int:
    """Compare all classes, or those of the types on the command line; 1 if a number differs."""
    import transformers

    wanted, result, bad = set(sys.argv[1:]), {}, 0
    for name in class_names():
        with quiet():
            try:
                kind = find_class(name)
                model_type = kind.config_class.model_type
            except Exception as failure:
                sys.stderr.write(f"{name}: {type(failure).__name__}: {failure}\n")
                continue
            if wanted and model_type not in wanted:
                continue
            if is_counted(kind):
                told = compare(kind, keys=True)
                bad += bool(told["differ"]) or not told["equal"]
            else:
                told = {"refused by": "name"} if refusal(kind) else {"differ": ["not refused"]}
                bad += "differ" in told
        result[name] = {"model_type": model_type, **told}
        if told.get("differ") or wanted or is_counted(kind):
            lines = told.get("differ", [])
            sys.stderr.write(f"{name} {model_type}: { ({**told, 'differ': len(lines)}) }\n")
            sys.stderr.writelines(f"    {line}\n" for line in lines[:12])
    if not wanted:
        record = {"transformers": transformers.__version__, "differ": bad, "classes": result}
        rows = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in result.items())
        head = json.dumps({k: v for k, v in record.items() if k != "classes"})[:-1]
        RESULT.write_text(f'{head}, "classes": {{\n{rows}\n}}}}\n', encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
