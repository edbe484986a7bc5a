"""Tiny models of transformers on a layout: trained, saved, exported, opened again by transformers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import shoal
from shoal.checkpoint.export.export_folder import export_folder
from shoal.fabric import World
from shoal.parallel.build.full_state import local_state

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parallel"))

from hf_families import FAMILIES, TOKENS, VOCABULARY, Family, causal

MORE: dict[str, tuple[str, bool, Mapping[str, Any]]] = {
    "llama": ("Llama", False, {}),
    "llama tied": ("Llama", False, {"tie_word_embeddings": True}),
    "gpt2": ("GPT2", False, {}),
    "mistral": ("Mistral", False, {"sliding_window": 4}),
    "qwen2": ("Qwen2", False, {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", True, {}),
    "gemma": ("Gemma", False, {}),
    "mixtral": ("Mixtral", False, {}),
    "bloom untied": ("Bloom", False, {"tie_word_embeddings": False}),
}
"""Families beside those of `hf_families`: class, 6 heads instead of 4, what else is said."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"dp_shard": 2, "zero": 3},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
}


def family(name: str) -> Family:
    if name in MORE:
        kind, six, more = MORE[name]
        model = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
        return Family(f"{kind}Config", model, causal, six, more)
    return FAMILIES[name]


def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    rows = outputs["logits"].transpose(1, 2)
    return torch.nn.functional.cross_entropy(rows, targets, reduction="none")


def exported(world: World, name: str, layout: str, folder: str) -> dict[str, Any]:
    """Train two steps and export twice, whole and in files; what rank 0 found."""
    torch.set_num_threads(1)
    root = Path(folder)
    made = family(name)
    draw = torch.Generator().manual_seed(7)
    tokens = torch.randint(2, VOCABULARY, (8, TOKENS + 1), generator=draw)
    batch = (tokens[:, :-1], tokens[:, 1:])
    run = shoal.parallelize(
        made.build,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        loss,
        LAYOUTS[layout],
        world=world,
        batch=8,
        micro_batch=2,
        sample=batch,
        folder=root / "run",
        average=0.5,
    )
    for rows in run.loader(torch.utils.data.TensorDataset(*batch)):
        run.step(rows)
    saved = run.save()
    weights = run.state_dict()
    here = sum(shard.elements for _, shard in local_state(run.program).values())
    with run._averaged_weights():
        averages = run.state_dict()
    unique = {tensor.data_ptr(): tensor.numel() for tensor in weights.values()}
    told: dict[str, Any] = {"share held": round(here / sum(unique.values()), 3)}
    if world.is_first:
        assert saved is not None
        numel = sum(tensor.numel() for tensor in weights.values())
        told["whole"] = opened(saved, root / "whole", made, weights, 5 * 10**9)
        told["in files"] = opened(saved, root / "files", made, weights, numel)  # about a quarter
        told["average"] = averaged(saved, root / "average", averages)
        told["average"]["like the weights"] = [
            name
            for name in run.program.parameters
            if name in averages and torch.equal(averages[name], weights[name])
        ]
    run.checkpoint_saver.close()
    for undo in run.program.on_close:
        undo()
    if run.lease is not None:
        run.lease.release()
    world.barrier()
    return told


def opened(
    saved: Path, out: Path, made: Family, weights: dict[str, torch.Tensor], shard_bytes: int
) -> dict[str, Any]:
    """Export, read the files, and open them with transformers; how far it is from the run."""
    import transformers

    written = export_folder(saved, out, shard_bytes=shard_bytes)
    stored = stored_in(out)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True
    )
    again = made.build().eval()
    again.load_state_dict(weights)
    inputs = made.inputs(3)
    with torch.no_grad():
        expected, found = again(**inputs).logits, model(**inputs).logits
    return {
        "files": list(written.files),
        "stored": sorted(stored),
        "unlike": [n for n, tensor in stored.items() if not torch.equal(tensor, weights[n])],
        "tied away": sorted(weights.keys() - stored.keys()),
        "class": type(model).__name__,
        "loading": {key: sorted(map(str, value)) for key, value in loading.items() if value},
        "equal logits": torch.equal(expected, found),
        "largest difference": float((expected - found).abs().max()),
        "untrained": bool(torch.equal(found, fresh_logits(made))),
    }


def stored_in(folder: Path) -> dict[str, torch.Tensor]:
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found = safetensors.torch.load_file(path)
        assert not stored.keys() & found.keys()
        stored |= found
    return stored


def fresh_logits(made: Family) -> torch.Tensor:
    """Of the model before training, as the run built it: what a lost weight would give."""
    torch.manual_seed(0)
    with torch.no_grad():
        found: torch.Tensor = made.build().eval()(**made.inputs(3)).logits
    return found


def averaged(saved: Path, out: Path, averages: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Export the averages; which of them differ from the run's, in the files and opened."""
    import transformers

    export_folder(saved, out, average=True)
    stored = stored_in(out)
    state = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    return {
        "unlike": [n for n, one in averages.items() if not torch.equal(stored.get(n, one), one)],
        "opened unlike": [n for n, one in averages.items() if not torch.equal(state[n], one)],
        "stored": sorted(stored),
    }


def wrongs(told: Mapping[str, Any]) -> list[str]:
    """What is not as it should be of a row, in words; nothing where the export is the model."""
    found = [] if told["share held"] < 0.9 else ["rank 0 held nearly all of it"]
    for kind in ("whole", "in files"):
        one = told[kind]
        found += [f"{kind}: {name} differs from the run's" for name in one["unlike"]]
        found += [f"{kind}: {key} {names}" for key, names in one["loading"].items()]
        if not one["equal logits"]:
            found.append(f"{kind}: logits differ by {one['largest difference']:.0e}")
        if one["untrained"]:
            found.append(f"{kind}: these are the logits of the model before training")
        lacking = {"config.json", "generation_config.json"} - {*one["files"]}
        found += [f"{kind}: no {name}" for name in sorted(lacking)]
    if sum(name.endswith(".safetensors") for name in told["in files"]["files"]) < 3:
        found.append("in files: hardly any")
    average = told["average"]
    found += [f"average: {name} differs" for name in average["unlike"] + average["opened unlike"]]
    if average["stored"] != told["whole"]["stored"]:
        found.append("average: other tensors than of the weights")
    if average["like the weights"]:
        found.append(f"average: {average['like the weights']} are the weights")
    return found
