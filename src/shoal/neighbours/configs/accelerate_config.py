"""Read Accelerate's configuration file, and translate it into the keys of a run.toml.

It is YAML, as `accelerate config` writes it to default_config.yaml, or JSON. It names processes,
formats and layouts, and no batch, no optimizer and no data: these stay a run's own. Every other key
is reported or refused: accelerate_keys.txt. Source: accelerate 1.15.0,
commands/config/config_args.py and commands/launch.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError, check_choice, format_choice_error, shorten
from shoal.neighbours.configs.written_config import (
    NARROW_BLOCKS,
    KeyVerdict,
    WrittenConfig,
    format_ignored_keys,
    read_table,
)

PREFIXED = ("fsdp", "fp8", "dynamo")
"""Blocks whose keys may omit the block's name as a prefix."""
PRECISIONS = {"no": "fp32", "false": "fp32", "bf16": "bf16", "fp16": "fp16"}
PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU")
BLOCK_OF = {
    "fsdp_config": "FSDP",
    "deepspeed_config": "DEEPSPEED",
    "megatron_lm_config": "MEGATRON_LM",
    "parallelism_config": "FSDP",
}
"""Blocks that count under one `distributed_type` alone."""
STAGES = ("ddp", "zero1", "zero2", "fsdp")
SHARDING = {
    "FULL_SHARD": ("fsdp", "yes"),
    "SHARD_GRAD_OP": ("fsdp", "no"),
    "NO_SHARD": ("ddp", "yes"),
    "HYBRID_SHARD": ("hsdp", "yes"),
    "HYBRID_SHARD_ZERO2": ("hsdp", "no"),
}
"""FSDP's strategies, 1 to 5 → Shoal's layout, and whether weights are resharded after forward."""
CONTEXTS = {"allgather": "gather", "alltoall": "ring"}


@dataclass(frozen=True)
class AccelerateSettings:
    """Accelerate's configuration in the keys of a run.toml.

    Attributes:
        values: section.key → value.
        ranks: processes in all.
        differs, told: lines for the user.
        ds_file: a configuration of DeepSpeed's with the other settings; "" none.
        verdicts: on every key of the file.
    """

    values: dict[str, Any]
    ranks: int
    differs: list[str]
    verdicts: tuple[KeyVerdict, ...]
    told: tuple[str, ...]
    ds_file: str = ""


def is_accelerate_file(file: str) -> bool:
    """Return whether a file is Accelerate's: by its suffix, or by a key that only it has."""
    path = Path(file)
    if path.suffix in (".yaml", ".yml"):
        return True
    if not path.is_file():
        return False
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # HJSON, or nothing
        return False
    return isinstance(found, dict) and "distributed_type" in found


def read(file: str | Path, *, processes: int = 0) -> AccelerateSettings:
    """Read a file of YAML or JSON.

    Args:
        processes: in all, in place of the file's; 0: as in the file.

    Raises:
        ConfigError: one line: not readable, an unknown key, a key for a feature that Shoal lacks, a
            value that Accelerate refuses, degrees whose product is not the number of processes.
    """
    where = shorten(str(file))
    config = _normalize_keys(_load(Path(file), where))
    found = _AccelerateReader(config, where, "Accelerate", (), read_table("accelerate_keys"))
    return found.read_settings(processes)


def _load(path: Path, where: str) -> dict[str, Any]:
    """Load the file as a dict.

    Raises:
        ConfigError: the file is no table of keys, or a key appears twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{where}: no such file; try: `accelerate config` writes one") from None
    except (OSError, ValueError) as failure:
        raise ConfigError(f"{where}: {failure}; try: a file of YAML") from None
    try:
        import yaml
    except ModuleNotFoundError:
        try:
            found = json.loads(text)
        except ValueError:
            raise ConfigError(
                f"{where}: YAML needs a package: pip install 'shoal[neighbours]'"
            ) from None
    else:
        try:
            found = yaml.load(text, Loader=_unique_key_loader(yaml))
        except yaml.YAMLError as failure:
            said = " ".join(str(failure).split())
            raise ConfigError(f"{where}: {said}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: a table of keys is wanted, got {shorten(str(found))}")
    return found


def _unique_key_loader(yaml: Any) -> Any:
    """Return PyYAML's safe loader, extended to refuse a key that appears twice."""

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names = [str(key.value) for key, _ in node.value]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise yaml.YAMLError(
                    f"{', '.join(twice)}: stands twice; try: leave one of them out"
                )
            return dict(super().construct_mapping(node, deep))

    return Loader


def _normalize_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert older forms of keys to today's, as Accelerate itself does."""
    found = {str(name): value for name, value in config.items()}
    if "fp16" in found:
        half = found.pop("fp16")
        found.setdefault("mixed_precision", "fp16" if half else "no")
    if "dynamo_backend" in found:
        found.setdefault("dynamo_config", {"dynamo_backend": found.pop("dynamo_backend")})
    for name in PREFIXED:
        block = found.get(f"{name}_config")
        if isinstance(block, Mapping):
            found[f"{name}_config"] = {
                key if str(key).startswith(name) else f"{name}_{key}": value
                for key, value in block.items()
            }
    return found


@dataclass
class _AccelerateReader(WrittenConfig):
    """Reader of the file, part by part, into the keys of a run.toml."""

    values: dict[str, Any] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)

    def read_settings(self, processes: int) -> AccelerateSettings:
        """Read all parts."""
        kind = str(self.value("distributed_type")).upper()
        kind = "NO" if kind == "FALSE" else kind  # YAML's own reading of NO
        known = (*PLAIN, *dict.fromkeys(BLOCK_OF.values()))
        check_choice(f"{self.where}: distributed_type", kind, known)
        verdicts = self._verdicts(kind)
        ranks = processes or (1 if kind == "NO" else int(self.value("num_processes")))
        nodes = int(self.value("num_machines"))
        if ranks % nodes:
            why = f"{ranks} processes in all are not as many on each; try: a divisor of it"
            raise self.make_error("num_machines", nodes, why)
        self.values["launch.processes"] = ranks // nodes
        if nodes > 1:
            self.values["launch.nodes"] = nodes
        self._precision()
        self._compiled()
        file = ""
        if kind == "FSDP":
            self._fsdp(ranks)
        elif kind == "DEEPSPEED":
            file = self._deepspeed(ranks)
        elif kind == "MEGATRON_LM":
            self._megatron(ranks)
        else:
            self.values["layout.strategy"] = "ddp" if ranks > 1 else "single"
        self._residual(kind)
        return AccelerateSettings(
            self.values,
            ranks,
            self.differs,
            tuple(verdicts),
            tuple(format_ignored_keys(verdicts)),
            file,
        )

    def _verdicts(self, kind: str) -> list[KeyVerdict]:
        """Judge every key; a block of another `distributed_type` is unread, as in Accelerate."""
        unread = []
        for block, owner in BLOCK_OF.items():
            if kind != owner and self.config.get(block):
                why = f"nothing, as in Accelerate: distributed_type is {kind}, not {owner}"
                unread.append(KeyVerdict(block, str(self.config.pop(block)), "told", why))
        return [*self.judge(), *unread]

    def _precision(self) -> None:
        said = str(self.value("mixed_precision")).lower()
        if said not in PRECISIONS:
            known = ("no", "bf16", "fp16")
            raise ConfigError(
                f"{self.where}: {format_choice_error('mixed_precision', said, known)}"
            )
        self.values["precision.compute"] = PRECISIONS[said]

    def _residual(self, kind: str) -> None:
        """Set the residual stream's format: autocast alone (DDP, one process) leaves it in fp32."""
        if kind not in PLAIN and self.values.get("precision.compute") == "bf16":
            self.values["precision.residual"] = "bf16"
            self.differs.append(NARROW_BLOCKS)

    def _compiled(self) -> None:
        said = str(self.value("dynamo_config.dynamo_backend")).upper()
        if said not in ("NO", "FALSE", "INDUCTOR"):
            why = "only torch.compile's own compiler is here; try: INDUCTOR"
            raise self.make_error("dynamo_config.dynamo_backend", said, why)
        if said == "INDUCTOR":
            self.values["train.compile"] = "blocks"

    def _fsdp(self, ranks: int) -> None:
        values, block = self.values, "fsdp_config"
        said = str(self.value(f"{block}.fsdp_sharding_strategy")).upper()
        after = str(self.value(f"{block}.fsdp_reshard_after_forward")).upper()
        if after in SHARDING:  # version 1 asks for its strategy under this name
            said, after = after, "TRUE"
        said = [*SHARDING][int(said) - 1] if said in ("1", "2", "3", "4", "5") else said
        if said not in SHARDING:
            path = f"{block}.fsdp_sharding_strategy"
            raise ConfigError(f"{self.where}: {format_choice_error(path, said, SHARDING)}")
        if after not in ("TRUE", "FALSE"):
            path = f"{block}.fsdp_reshard_after_forward"
            raise self.make_error(path, after.lower(), "true or false is wanted; try: true")
        strategy, reshard = SHARDING[said]
        reshard = "no" if after == "FALSE" else reshard
        values["layout.strategy"] = strategy if ranks > 1 else "single"
        if reshard == "no" and strategy != "ddp" and ranks > 1:
            values["fsdp.reshard"] = reshard
        if names := str(self.value(f"{block}.fsdp_transformer_layer_cls_to_wrap") or ""):
            values["layout.blocks"] = [one.strip() for one in names.split(",")]
        if self.value(f"{block}.fsdp_activation_checkpointing"):
            values["memory.recompute"] = "full"
        if self.value(f"{block}.fsdp_activation_checkpointing_offload"):
            values["memory.offload"] = "activations"
        if self.value(f"{block}.fsdp_offload_params"):
            if "memory.offload" in values:
                path = f"{block}.fsdp_activation_checkpointing_offload"
                raise self.make_error(path, True, "a run offloads one thing; try: false")
            values["memory.offload"] = "parameters"
        if self.block("parallelism_config"):
            self._degrees(ranks)

    def _degrees(self, ranks: int) -> None:
        block = "parallelism_config"
        names = {axis: f"{block}.{block}_{axis}_size" for axis in ("dp_replicate", "dp_shard",
                                                                  "cp", "tp")}  # fmt: skip
        sizes = {axis: int(self.value(path)) for axis, path in names.items()}
        self._check_product(block, sizes, ranks)
        self.values.pop("layout.strategy")
        self.values |= {f"layout.{axis}": size for axis, size in sizes.items() if size > 1}
        if not any(size > 1 for size in sizes.values()):
            self.values["layout.strategy"] = "single"
        if sizes["dp_shard"] > 1:
            self.values["layout.zero"] = 3
        if sizes["cp"] > 1:
            path = f"{block}.{block}_cp_comm_strategy"
            said = str(self.value(path))
            check_choice(f"{self.where}: {path}", said, CONTEXTS)
            self.values["layout.context"] = CONTEXTS[said]

    def _check_product(self, block: str, sizes: Mapping[str, int], ranks: int) -> None:
        product = 1
        for size in sizes.values():
            product *= size
        if product != ranks:
            said = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
            raise ConfigError(
                f"{self.where}: {block}: {said} is {product}, and num_processes {ranks}; try: "
                f"num_processes = {product}"
            )

    def _deepspeed(self, ranks: int) -> str:
        block, values = "deepspeed_config", self.values
        if file := str(self.value(f"{block}.deepspeed_config_file") or ""):
            inside = ("zero_stage", "offload_optimizer_device", "offload_param_device",
                      "gradient_accumulation_steps", "gradient_clipping")  # fmt: skip
            both = [name for name in inside if name in self.block(block)]
            both += ["mixed_precision"] if "mixed_precision" in self.config else []
            if both:
                raise ConfigError(
                    f"{self.where}: {', '.join(both)}: {block}.deepspeed_config_file says it, and "
                    f"Accelerate takes no second word; try: leave it out"
                )
            values.pop("precision.compute")
            return file
        if (stage := self.value(f"{block}.zero_stage")) > 3:
            raise self.make_error(f"{block}.zero_stage", stage, "0, 1, 2 or 3 is wanted; try: 3")
        values["layout.strategy"] = STAGES[stage] if ranks > 1 else "single"
        devices = []
        for name, least in (("optimizer", 1), ("param", 3)):
            path = f"{block}.offload_{name}_device"
            device = str(self.value(path)).lower()
            check_choice(f"{self.where}: {path}", device, ("none", "cpu", "nvme"))
            if device != "none" and stage < least:
                self.differs.append(f"{path}: nothing below stage {least}, as in DeepSpeed")
                device = "none"
            devices.append(device)
        if devices != ["none", "none"]:
            values["memory.offload"] = "parameters" if devices[1] != "none" else "optimizer"
            values["memory.offload_to"] = "files" if "nvme" in devices else "host"
            if devices[0] == "none":
                self.differs.append(
                    "offload_param_device: the optimizer's state waits on the host, too"
                )
        if (steps := self.value(f"{block}.gradient_accumulation_steps")) > 1:
            values["train.accumulate"] = steps
        values["optimizer.clip"] = float(self.value(f"{block}.gradient_clipping"))
        return ""

    def _megatron(self, ranks: int) -> None:
        block, values = "megatron_lm_config", self.values
        sizes = {
            axis: int(self.value(f"{block}.megatron_lm_{name}") or 1)
            for axis, name in (("tp", "tp_degree"), ("pp", "pp_degree"),
                               ("cp", "context_parallel_size"))
        }  # fmt: skip
        rest, left = divmod(ranks, sizes["tp"] * sizes["pp"] * sizes["cp"])
        if left or not rest:
            self._check_product(block, sizes, ranks)
        values |= {f"layout.{axis}": size for axis, size in sizes.items() if size > 1}
        split = self.value(f"{block}.megatron_lm_use_distributed_optimizer") and rest > 1
        if rest > 1:
            values["layout.dp_shard" if split else "layout.dp_replicate"] = rest
        if split:
            values["layout.zero"] = 1
        if ranks == 1:
            values["layout.strategy"] = "single"
        sequence = self.value(f"{block}.megatron_lm_sequence_parallelism")
        if sequence is not None and sizes["tp"] > 1:
            on = str(sequence).lower() == "true"
            values["layout.sequence_parallel"] = "on" if on else "off"
        if steps := self.value(f"{block}.megatron_lm_num_micro_batches"):
            values["train.accumulate"] = steps
        grain = self.value(f"{block}.megatron_lm_recompute_granularity")
        if grain not in (None, "full", "selective"):
            path = f"{block}.megatron_lm_recompute_granularity"
            raise ConfigError(
                f"{self.where}: {format_choice_error(path, str(grain), ['selective', 'full'])}"
            )
        if grain or self.value(f"{block}.megatron_lm_recompute_activations"):
            values["memory.recompute"] = grain or "selective"
        if self.value(f"{block}.megatron_lm_optimizer_cpu_offload"):
            values["memory.offload"] = "optimizer"
        values["optimizer.clip"] = float(self.value(f"{block}.megatron_lm_gradient_clipping"))
