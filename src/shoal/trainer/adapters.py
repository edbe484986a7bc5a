"""Add peft adapters to a model as [tune] says, and write the files that peft needs to load them.

Formula   LoRA: y = W x + (alpha / rank) · B (A dropout(x)), with B = 0 at the start; DoRA: the rows
          of W + (alpha / rank) · B A to a length that is trained
Source    peft, LoraConfig, get_peft_model_state_dict
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.base.errors import ConfigError, nearest_word
from shoal.base.runlog.atomic_files import write_atomically
from shoal.checkpoint.format.hub_folder import ADAPTER_CONFIG, HUB
from shoal.config.sections import TuneSection

SOLE = "default"
"""peft's default name for the only adapter of a model."""


def add_adapters(model: nn.Module, tune: TuneSection, base: str) -> nn.Module:
    """Freeze a model and add adapters, initialised from torch's default generator.

    Args:
        model: the base model.
        tune: the [tune] section of run.toml.
        base: path or name of the base weights, written into the adapter's config.

    Raises:
        ConfigError: a target matches no layer of the model, or its layer cannot have an adapter.
    """
    import peft  # an extra, and slow

    names = {name for name, part in model.named_modules() if name}
    for target in tune.targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            ends = {name.rpartition(".")[2] for name in names}
            near = nearest_word(target, ends) or sorted(e for e in ends if not e.isdigit())[0]
            raise ConfigError(
                f"tune.targets: {target} is the end of no layer's name in {type(model).__name__}; "
                f"try: {near}"
            )
    causal = hasattr(model, "prepare_inputs_for_generation")
    said = peft.LoraConfig(
        r=tune.rank,
        lora_alpha=tune.scale,
        lora_dropout=tune.dropout,
        target_modules=list(tune.targets) or "all-linear",
        use_dora=tune.adapter == "dora",
        task_type="CAUSAL_LM" if causal else None,
        base_model_name_or_path=base,
    )
    try:
        with warnings.catch_warnings():  # the name is restored below
            warnings.filterwarnings("ignore", "The PEFT config's `base_model_name_or_path`")
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
            adapted: nn.Module = peft.get_peft_model(model, said)
    except (ValueError, TypeError, NotImplementedError) as failure:
        line = (str(failure).splitlines() or [type(failure).__name__])[0]
        raise ConfigError(
            f"tune.adapter = {tune.adapter}: peft refuses {type(model).__name__}: {line}; try: "
            f"tune.targets with names of linear layers"
        ) from failure
    said.base_model_name_or_path = base  # peft overwrites it with the model's own name
    return adapted


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is a peft model with adapters."""
    if "peft" not in sys.modules:
        return False
    from peft import PeftModel

    return isinstance(module, PeftModel)


def write_adapter_config(module: Any, names: Iterable[str], folder: Path | None) -> dict[str, str]:
    """Write adapter_config.json to `folder/hub`; return peft's tensor name → name in the module.

    Args:
        module: the peft model.
        names: of all parameters, on whichever rank they are.
        folder: None on ranks that write no files.
    """
    from peft import get_peft_model_state_dict

    adapter = module.active_adapter if isinstance(module.active_adapter, str) else SOLE
    # peft selects by tensor: empty meta tensors let us map its selection back to names.
    known = {name: torch.empty(0, device="meta") for name in names}
    told = {id(tensor): name for name, tensor in known.items()}
    chosen = get_peft_model_state_dict(
        module, state_dict=known, adapter_name=adapter, save_embedding_layers=False
    )
    if folder is not None:
        said = {**module.peft_config[adapter].to_dict(), "inference_mode": True}
        text = json.dumps(said, indent=2, sort_keys=True, default=_to_json_value) + "\n"
        with contextlib.suppress(OSError):  # a failed write must not end the run
            (folder / HUB).mkdir(exist_ok=True)
            write_atomically(folder / HUB / ADAPTER_CONFIG, text)
    return {short: told[id(tensor)] for short, tensor in chosen.items()}


def _to_json_value(value: Any) -> Any:
    """Return a JSON value for an object that JSON lacks: a sorted list for a set, else its text."""
    return sorted(value) if isinstance(value, set) else str(value)
