"""The planner's number of parameters beside that of transformers, for every class with a head.

    every class   of the installed transformers that ends a causal or a conditional language model:
                  its default config.json must be counted as the class counts itself on the meta
                  device, ties once: by arithmetic, else by a trace; or be refused by name
    every key     of the types that are counted: from two small odd shapes, each key is changed, is
                  left out, and stands under its other name; keys of other types are added to it;
                  each number must be equal or refused
    combinations  of the ten types that are used most: ties, biases, head_dim, one key and value
                  head, an even and an odd vocabulary, all together
    text_config   of a class with a text model that is counted: the part in a file of its own

    python tests/proof/hf_counts.py            every class, about 20 minutes of one core; writes
                                               proof/results/hf-counts.json when the last one is done
    python tests/proof/hf_counts.py TYPE …     those model_types, anew; writes nothing
    make proof PART=counts                     the first of them

The exit status is 1 if a number differs. The program resumes where it stopped: build/hf-counts holds
the row of each class, for this version of transformers, of the planner's rows and of this program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import itertools
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError, UserError
from shoal.cli.plan_subject import resolve_model_facts
from shoal.config.load import load_config
from shoal.forecast.machines.cluster_syntax import parse_machines
from shoal.forecast.models.hf_config import TYPES, VISION, shape_from_config
from shoal.forecast.models.transformer_costs import transformer_facts

TOKENS = 64
"""Tokens of a row in a trace."""
ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "proof" / "results" / "hf-counts.json"
PROGRESS = ROOT / "build" / "hf-counts"
SOURCES = (
    "src/shoal/forecast/models/hf_*.py",
    "src/shoal/base/estimates/transformer_shape.py",
    "src/shoal/cli/plan_*.py",
    "src/shoal/trace/*/*.py",
    "tests/proof/hf_counts.py",
)
"""Files on which a row of the result depends, with the version of transformers."""
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

FOREIGN: Document = {
    "head_dim": 12, "num_key_value_heads": 1, "num_kv_heads": 2, "attention_bias": True,
    "attention_out_bias": True, "mlp_bias": True, "qkv_bias": True, "use_qkv_bias": True,
    "use_bias": True, "bias": True, "no_bias": False, "enable_bias": False, "lm_head_bias": True,
    "qk_layernorm": True, "use_qk_norm": True, "multi_query": True, "new_decoder_architecture": True,
    "parallel_attn": False, "use_parallel_residual": True, "use_post_norm": False, "n_inner": 68,
    "ffn_dim": 68, "ffn_hidden_size": 68, "intermediate_size": 68, "intermediate_size_mlp": 68,
    "moe_intermediate_size": 68, "shared_expert_intermediate_size": 68, "num_experts": 3,
    "num_local_experts": 3, "n_routed_experts": 3, "n_shared_experts": 1, "num_shared_experts": 1,
    "first_k_dense_replace": 2, "mlp_only_layers": [1], "decoder_sparse_step": 2, "q_lora_rank": 8,
    "kv_lora_rank": 8, "type_vocab_size": 5, "n_positions": 30, "max_position_embeddings": 30,
    "word_embed_proj_dim": 24, "do_layer_norm_before": False, "add_cross_attention": True,
    "is_encoder_decoder": True, "per_layer_config": {"1": {"intermediate_size": 68}},
    "text_config": {"hidden_size": 24, "vocab_size": 11}, "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5, "tie_word_embeddings": True, "vocab_size_per_layer_input": 11,
    "quantization_config": None, "pruned_heads": {"0": [1]}, "id2label": {"0": "a"},
}  # fmt: skip
"""Keys of other types, which a file may hold; the class may read them or ignore them."""


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
    config = kind.config_class.from_dict(json.loads(json.dumps(document)))
    return sum(parameter.numel() for parameter in built(kind, config).parameters())


def built(kind: Any, config: Any) -> Any:
    """The module of a class on the meta device."""
    import torch

    with torch.device("meta"), no_initial_values():
        return kind(config)


@contextlib.contextmanager
def no_initial_values() -> Iterator[None]:
    """Skip the initial values of layers, which take half of the time."""
    from torch import nn

    layers = (nn.Linear, nn.Embedding)
    resets = [layer.reset_parameters for layer in layers]
    for layer in layers:
        layer.reset_parameters = lambda self: None
    try:
        yield
    finally:
        for layer, reset in zip(layers, resets, strict=True):
            layer.reset_parameters = reset


def planned(document: Document) -> int | str:
    """The planner's number for a config.json, or the line with which it refuses the file."""
    try:
        return transformer_facts(shape_from_config(document), 64, 2).trainable
    except ConfigError as refusal:
        return str(refusal)


def traced(document: Document) -> tuple[int, int] | str:
    """The numbers of `shoal plan` for a config.json that it traces: of all units, and trainable ones.

    Returns:
        The two, or the line with which it refuses the file.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        loaded = load_config(None, [f"model.name=hf:{path}", f"data.sequence={TOKENS}"])
        try:
            facts = resolve_model_facts(loaded, parse_machines("8xH100-80GB"), 2, [])
        except UserError as refusal:
            return str(refusal).replace(folder, "")
    return sum(one.count * (one.parameters + one.frozen_parameters) for one in facts.units), (
        facts.trainable
    )


def trace_row(kind: Any) -> dict[str, Any]:
    """Compare the default of a class that arithmetic does not count with the class itself."""
    try:
        document = document_of(kind, kind.config_class())
        parameters = list(built(kind, kind.config_class()).parameters())
    except Exception:  # a class without a default configuration, or that cannot be built from it
        document = {"model_type": kind.config_class.model_type, "architectures": [kind.__name__]}
        parameters = []
    said = traced(document)
    if isinstance(said, str):
        return {"refused by": "name", "line": said} if "; try: " in said else {"differ": [said]}
    true = tuple(sum(p.numel() for p in parameters if p.requires_grad >= t) for t in (False, True))
    return {"traced": true[0]} if said == true else {"differ": [f"{said} for {true}"]}


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
    common = {field.name for field in dataclasses.fields(base_class())} - {"tie_word_embeddings"}
    truths = [k for k, value in document.items() if isinstance(value, bool) and k not in common]
    for one, other in itertools.combinations(truths, 2):
        both = {one: not document[one], other: not document[other]}
        yield f"{json.dumps(both)}", {**document, **both}
    for other, name in (getattr(kind.config_class, "attribute_map", None) or {}).items():
        if name in document:
            rest = {key: value for key, value in document.items() if key != name}
            yield f"{name} as {other}", {**rest, other: document[name]}


MOST_USED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2",
             "gpt_neox", "mixtral", "deepseek_v3")  # fmt: skip
CHOICES: tuple[tuple[Document, ...], ...] = (
    ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, {}),
    ({"attention_bias": True}, {"attention_bias": False}, {}),
    ({"head_dim": 14}, {"head_dim": None}, {}),
    ({"num_key_value_heads": 1}, {"num_key_value_heads": None}, {}),
    ({"mlp_bias": True}, {}),
    ({"vocab_size": 256}, {"vocab_size": 257}),
)
"""Keys of the combinations, each of which a file of the types used most may have or leave out."""

NAMES = (
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    ("num_key_value_heads", "num_kv_heads"),
    ("hidden_size", "n_embd", "n_embed", "d_model"),
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "moe_intermediate_size"),
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    ("max_position_embeddings", "n_positions", "n_ctx"),
)
"""Names that one number has in the files of different types."""


def base_class() -> Any:
    """Return the base class of all configurations, whose own keys change no weights."""
    return find_class("PreTrainedConfig")


def foreign_keys(document: Document) -> Iterator[tuple[str, Document]]:
    """Yield the file with one key of another type, or with a key under another type's name."""
    for key, value in FOREIGN.items():
        if key not in document:
            yield f"and {key} = {json.dumps(value)}", {**document, key: value}
    for own, other in (pair for names in NAMES for pair in itertools.permutations(names, 2)):
        if document.get(own) is not None and other not in document:
            rest = {key: value for key, value in document.items() if key != own}
            yield f"{own} as {other}", {**rest, other: document[own]}


def combinations(document: Document) -> Iterator[tuple[str, Document]]:
    """Yield the file with each combination of CHOICES; {} leaves a key as it is."""
    for choice in itertools.product(*CHOICES):
        chosen = {key: value for keys in choice for key, value in keys.items()}
        yield json.dumps(chosen), {**document, **chosen}


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
    row: dict[str, Any] = {"equal": 0, "refused": 0, "not built": 0, "differ": []}

    def check(name: str, document: Document) -> None:
        guess = planned(document)
        if isinstance(guess, str):
            row["refused"] += 1
            return
        try:
            true = count(kind, document)
        except Exception:  # whatever a configuration that cannot be built raises
            row["not built"] += 1
            return
        if true == guess:
            row["equal"] += 1
        else:
            row["differ"].append(f"{name}: {guess} for {true}")

    for name, document in shapes(kind, default=default):
        check(name, document)
        if keys and name.startswith("small") and "saved" not in name:
            more = [*changes(kind, document), *hidden_act(document), *foreign_keys(document)]
            if kind.config_class.model_type in MOST_USED and "tied" not in name:
                more += combinations(document)
            for what, changed in more:
                check(f"{name}; {what}", changed)
    return row


def is_counted(kind: Any) -> bool:
    """Whether the planner counts this class at all."""
    model_type = kind.config_class.model_type
    row = TYPES[model_type].classes if model_type in TYPES else VISION.get(model_type, "")
    return kind.__name__ in row.split()


def text_part(kind: Any) -> dict[str, Any]:
    """Compare the text_config of a class that is refused, if its type is counted in a file alone."""
    try:
        text = kind.config_class().to_dict().get("text_config") or {}
    except Exception:  # a class without a default configuration
        return {}
    if text.get("model_type") not in TYPES:
        return {}
    alone = find_class(TYPES[text["model_type"]].classes.split()[0])
    document = document_of(alone, alone.config_class.from_dict(text), brief=True)
    guess = planned(document)
    if isinstance(guess, str):
        return {"text_config": "refused"}
    true = count(alone, document)
    return {"text_config": "equal"} if true == guess else {"differ": [f"text: {guess} for {true}"]}


def digest() -> str:
    """Return the digest of the files and the version on which a row depends."""
    import transformers

    files = sorted(path for pattern in SOURCES for path in ROOT.glob(pattern))
    content = [path.read_bytes() for path in files]
    return hashlib.sha256(b"\0".join([transformers.__version__.encode(), *content])).hexdigest()


def row_of(name: str) -> dict[str, Any] | None:
    """Return the row of one class, or None if this machine cannot load it."""
    with quiet():
        try:
            kind = find_class(name)
            model_type = kind.config_class.model_type
        except Exception as failure:
            sys.stderr.write(f"{name}: {type(failure).__name__}: {failure}\n")
            return None
        if is_counted(kind):
            return {"model_type": model_type, **compare(kind, keys=True)}
        return {"model_type": model_type, **trace_row(kind), **text_part(kind)}


def model_type_of(name: str) -> str:
    """Return the model_type of a class, "" if this machine cannot load it."""
    with contextlib.suppress(Exception), quiet():
        return str(find_class(name).config_class.model_type)
    return ""


def main() -> int:
    """Compare all classes, or those of the types on the command line; 1 if a number differs."""
    import transformers

    wanted, result, bad = set(sys.argv[1:]), {}, 0
    progress = PROGRESS / f"{digest()[:16]}.json"
    rows = json.loads(progress.read_text("utf-8")) if progress.exists() and not wanted else {}
    for name in class_names():
        if wanted and model_type_of(name) not in wanted:
            continue
        row = rows.get(name) or row_of(name)
        if row is None:
            continue
        result[name] = row
        lines = row.get("differ", [])
        bad += bool(lines) or row.get("equal", 1) == 0
        if "refused by" not in row or lines or wanted:
            sys.stderr.write(f"{name} { ({**row, 'differ': len(lines)}) }\n")
            sys.stderr.writelines(f"    {line}\n" for line in lines[:12])
        if not wanted and name not in rows:
            progress.parent.mkdir(parents=True, exist_ok=True)
            progress.write_text(json.dumps(result), encoding="utf-8")
    if not wanted:
        counted, seen = (sum(key in row for row in result.values()) for key in ("equal", "traced"))
        refused = len(result) - counted - seen
        sums = {"counted": counted, "traced": seen, "refused": refused, "differ": bad}
        head = json.dumps({"transformers": transformers.__version__, **sums})[:-1]
        lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in result.items())
        RESULT.write_text(f'{head}, "classes": {{\n{lines}\n}}}}\n', encoding="utf-8")
        progress.unlink(missing_ok=True)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
