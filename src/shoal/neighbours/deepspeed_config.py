"""Reads a DeepSpeed configuration, and says in `Settings` what it means here.

It may be a dict, a file of HJSON, or url-safe base64. Numbers are DeepSpeed's own: the batch
equation with its floor divisions (`train_batch_size` = micro-batch × accumulation × data-parallel
size), "Adam" that is AdamW without decay, clipping at 1.0 from 0.19.3 on and none before, "auto"
that is a default wherever DeepSpeed or its users' trainers have one. Whatever is not read is told
or refused, key by key: `deepspeed_keys`.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError, nearest, short
from shoal.neighbours.deepspeed_keys import Judge, Verdict, keys, shown, version

CLIPS_SINCE = (0, 19, 3)
"""First version in which `gradient_clipping`, where nobody says it, is 1.0; before, 0.0 (none)."""


@dataclass(frozen=True)
class LossScale:
    """How fp16's loss scale starts and moves, as DeepSpeed's scalers move it.

    fixed   a scale that stays; 0: it moves · initial  the first one · window  clean steps after
    which it doubles · least  below which it does not go
    hysteresis               overflows until it halves: 2 leaves the first one alone; stage 0 has 1
    consecutive_hysteresis   refill that count at every clean step, not only where the scale doubles
    stops                    an overflow at `least` ends the run (stages 1 to 3)
    """

    fixed: float = 0.0
    initial: float = 65536.0
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    least: float = 1.0
    stops: bool = True


@dataclass(frozen=True)
class Settings:
    """What a DeepSpeed configuration asks for, every "auto" and default filled in.

    batch = micro_batch × accumulate × data-parallel size · stage  of ZeRO, 0 to 3
    offload_to   host or files (nvme) · compute  fp32, bf16, fp16 · clip  0: none
    optimizer    a class of torch.optim, or Lion; "" none is configured, the script brings its own
    optimizer_args, scheduler_args   keyword arguments, of DeepSpeed's meaning and defaults
    scheduler    one of `deepspeed_rates`, or a class of torch.optim.lr_scheduler; "" none
    reduce       format in which gradients travel: fp32, bf16; "" as they are kept
    recompute    keys of activation_checkpointing that are on: for models that ask for them
    verdicts     of every key that was written · told  lines for the user
    """

    batch: int
    micro_batch: int
    accumulate: int
    stage: int = 0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    offload_to: str = "host"
    compute: str = "fp32"
    loss_scale: LossScale = LossScale()
    clip: float = 1.0
    optimizer: str = ""
    optimizer_args: dict[str, Any] = field(default_factory=dict)
    scheduler: str = ""
    scheduler_args: dict[str, Any] = field(default_factory=dict)
    reduce: str = ""
    recompute: tuple[str, ...] = ()
    drop_last: bool = False
    steps_per_print: int = 0
    wall_clock_breakdown: bool = False
    verdicts: tuple[Verdict, ...] = ()
    told: tuple[str, ...] = ()


def read(
    config: Mapping[str, Any] | str | Path,
    *,
    data_parallel: int,
    era: str = "",
    unsaid_clip: float | None = None,
    brought: Collection[str] = (),
) -> Settings:
    """Read a configuration for a number of data-parallel ranks.

    config        a dict, the path of a file, or url-safe base64 of one
    era           DeepSpeed's version, as 0.19.8: decides what clipping nobody speaks of, and which
                  keys are gone
    unsaid_clip   taken, with a line, where neither `gradient_clipping` nor a version is said; None
                  refuses that
    brought       "optimizer", "scheduler": what the script hands over itself, which then counts
    Errors        ConfigError, one line: not readable, a key that nobody knows, one that means what
                  is not here, a value that DeepSpeed refuses, or batches that do not multiply
    """
    where = "ds_config" if isinstance(config, Mapping) else short(str(config))
    reader = _Reader(_load(config, where), where, [])
    reader.resolve_auto()
    verdicts = tuple(Judge(version(era), where, keys())(reader.config))
    lines: dict[str, list[str]] = {}
    for one in verdicts:
        if one.fate == "told" and not isinstance(one.value, Mapping):
            lines.setdefault(one.words, []).append(one.path)
    reader.told += [f"{', '.join(paths)}: {words}" for words, paths in lines.items()]
    stage, offload = reader.zero()
    compute, loss_scale = reader.precision(stage)
    batch, micro_batch, accumulate = reader.batches(data_parallel)
    optimizer, optimizer_args = reader.optimizer("optimizer" in brought)
    scheduler, scheduler_args = reader.scheduler("scheduler" in brought)
    clip = reader.clip(era, unsaid_clip)
    whole = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro_batch}
    for name, value in {**whole, "gradient_accumulation_steps": accumulate}.items():
        if name not in reader.config:
            reader.told.append(f"{name} = {value}, on {data_parallel} data-parallel ranks")
    return Settings(
        batch, micro_batch, accumulate, stage, **offload,
        compute=compute, loss_scale=loss_scale, clip=clip,
        optimizer=optimizer, optimizer_args=optimizer_args,
        scheduler=scheduler, scheduler_args=scheduler_args,
        reduce=reader.reduce(), recompute=reader.recompute(),
        drop_last=reader.flag("", "dataloader_drop_last"),
        steps_per_print=reader.whole("", "steps_per_print", 0),
        wall_clock_breakdown=reader.flag("", "wall_clock_breakdown"),
        verdicts=verdicts, told=tuple(reader.told),
    )  # fmt: skip


def _load(config: Mapping[str, Any] | str | Path, where: str) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return {**config}
    try:
        there = os.path.exists(config)
        text = Path(config).read_text() if there else base64.urlsafe_b64decode(str(config)).decode()
    except (UnicodeDecodeError, binascii.Error, ValueError):
        raise ConfigError(f"{where}: no such file, nor base64 of a configuration") from None

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"{where}: {', '.join(twice)}: stands twice; nearest: leave one out")
        return dict(pairs)

    loads, said = _parser()
    try:
        found = loads(text, object_pairs_hook=once)
    except ValueError as failure:
        raise ConfigError(f"{where}: {failure}{said}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: a table of keys is wanted, got {shown(found)}")
    return found


def _parser() -> tuple[Callable[..., Any], str]:
    """hjson's, where it is installed, as beside DeepSpeed itself; else JSON's."""
    try:
        import hjson
    except ModuleNotFoundError:
        said = "; comments and trailing commas (HJSON) need: pip install 'shoal[neighbours]'"
        return json.loads, said
    return hjson.loads, ""


FILLED_BY_TRAINERS = ("lr", "warmup_num_steps", "total_num_steps", "type")
"""Last words of keys whose "auto" nobody knows but the trainer that fills it in."""

FUSED = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
"""Defaults of DeepSpeed's own Adam; torch's AdamW decays by 0.01 where nobody says it."""

TORCH = ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam",
         "RMSprop", "Rprop", "SGD")  # fmt: skip
"""Classes of torch.optim that step on parts and need no closure."""

ELSEWHERE = {
    "lamb": 'AdamW, or "client" optimizer shoal.optim.lamb:LAMB, which clamps no ratio',
    "muon": "AdamW, or optimizer.name=muon in a run.toml",
    "muadam": "AdamW, with the script's own optimizer of mup",
    "muadamw": "AdamW, with the script's own optimizer of mup",
    "musgd": "SGD, with the script's own optimizer of mup",
    "onebitadam": "AdamW, with layout.compress=int8",
    "zerooneadam": "AdamW, with layout.compress=int8",
    "onebitlamb": "AdamW, with layout.compress=int8",
    "lbfgs": "AdamW: LBFGS calls the model itself",
    "sparseadam": "AdamW: gradients travel dense",
}
"""Optimizers that are refused, in lower case → the nearest."""


@dataclass
class _Reader:
    """A configuration's values by their paths, and the lines that reading them leaves."""

    config: dict[str, Any]
    where: str
    told: list[str]

    def wrong(self, path: str, value: Any, why: str) -> ConfigError:
        return ConfigError(f"{self.where}: {path} = {shown(value)}: {why}")

    def block(self, path: str) -> dict[str, Any]:
        """A table by its path; {} where it is missing."""
        found: Any = self.config
        for name in path.split(".") if path else ():
            found = found.get(name) or {}
            if not isinstance(found, Mapping):
                raise self.wrong(path, found, "a table is wanted, {…}")
        return dict(found)

    def number(self, block: str, name: str, default: float, least: float = 0.0) -> float:
        """A finite number of at least `least`; texts of numbers count, true and false do not."""
        value, path = self.block(block).get(name), f"{block}.{name}".lstrip(".")
        if value is None:
            return default
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number) or number < least:
            raise self.wrong(
                path, value, f"a number from {least:g} on is wanted; nearest: {default:g}"
            )
        return number

    def whole(self, block: str, name: str, default: int, least: int = 0) -> int:
        """As `number`, without a fraction."""
        number = self.number(block, name, default, least)
        if number != int(number):
            raise self.wrong(f"{block}.{name}".lstrip("."), number, "a whole number is wanted")
        return int(number)

    def flag(self, block: str, name: str, default: bool = False) -> bool:
        value = self.block(block).get(name, default)
        words = {"true": True, "false": False, "none": default}
        found = words.get(str(value).lower())
        if found is None:
            raise self.wrong(f"{block}.{name}".lstrip("."), value, "true or false is wanted")
        return found

    def resolve_auto(self) -> None:
        """Bring old forms into today's, and take every "auto" for what stands without the key."""
        config = self.config
        if "bfloat16" in config:
            if "bf16" in config:
                raise self.wrong("bfloat16", "…", "is bf16's old name, and bf16 is there too")
            config["bf16"] = config.pop("bfloat16")
        if isinstance(config.get("zero_optimization"), bool):
            stage = int(config["zero_optimization"])
            config["zero_optimization"] = {"stage": stage}
            self.told.append(f"zero_optimization = true or false: stage {stage}")
        auto: list[str] = []
        self.config = self._without_auto(config, "", auto)
        if "gradient_clipping" in auto:
            auto.remove("gradient_clipping")
            self.config["gradient_clipping"] = 1.0
            self.told.append('gradient_clipping = "auto": 1.0, as Accelerate fills it in')
        if auto:
            self.told.append(f'"auto" is what holds without the key: {", ".join(auto)}')

    def _without_auto(
        self, block: Mapping[str, Any], inside: str, auto: list[str]
    ) -> dict[str, Any]:
        kept = {}
        for name, value in block.items():
            if isinstance(value, Mapping):
                kept[name] = self._without_auto(value, f"{inside}{name}.", auto)
            elif value != "auto":
                kept[name] = value
            elif inside.startswith(("optimizer.", "scheduler.")) and name in FILLED_BY_TRAINERS:
                why = "only the trainer that fills it in knows it; nearest: the value itself"
                raise self.wrong(f"{inside}{name}", value, why)
            else:
                auto.append(f"{inside}{name}")
        return kept

    def batches(self, ranks: int) -> tuple[int, int, int]:
        """Solve DeepSpeed's batch equation: floor divisions, then equality."""
        names = (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        )
        batch, micro, steps = (self.whole("", name, 0, 1) for name in names)
        said = ", ".join(f"{name} = {self.config[name]}" for name in names if name in self.config)
        if batch and not micro:
            micro = batch // ranks // (steps or 1)
            steps = steps or 1
        elif batch:
            steps = steps or batch // micro // ranks
        elif micro:
            steps = steps or 1
            batch = micro * steps * ranks
        else:
            raise ConfigError(
                f"{self.where}: {said or 'no batch'}: says no number of samples; nearest: "
                f"train_micro_batch_size_per_gpu = 1"
            )
        if batch != micro * steps * ranks:
            product = max(1, micro) * max(1, steps) * ranks
            raise ConfigError(
                f"{self.where}: {said}: {batch} ≠ micro-batch {micro} × accumulation {steps} × "
                f"{ranks} data-parallel ranks; nearest: train_batch_size = {product}"
            )
        return batch, micro, steps

    def zero(self) -> tuple[int, dict[str, Any]]:
        """Read ZeRO's stage, and what is offloaded whereto."""
        zero = "zero_optimization"
        stage = self.whole(zero, "stage", 0)
        if stage > 3:
            raise self.wrong(f"{zero}.stage", stage, "0, 1, 2 or 3 is wanted; nearest: 3")
        devices = {}
        for name, old in (
            ("offload_optimizer", "cpu_offload"),
            ("offload_param", "cpu_offload_param"),
        ):
            device = self.block(f"{zero}.{name}").get("device", "none")
            if self.flag(zero, old):
                if name in self.block(zero):
                    raise self.wrong(
                        f"{zero}.{old}", True, f"is {name}'s old name, which is there too"
                    )
                device = "cpu"
            if device not in ("none", "cpu", "nvme"):
                close = nearest(str(device), ["none", "cpu", "nvme"]) or "cpu"
                raise self.wrong(
                    f"{zero}.{name}.device", device, f"none, cpu, nvme; nearest: {close}"
                )
            needed = 1 if name == "offload_optimizer" else 3
            if device != "none" and stage < needed:
                self.told.append(
                    f"{zero}.{name}: means nothing below stage {needed}, as in DeepSpeed"
                )
                device = "none"
            devices[name] = device
        optimizer, parameters = devices.values()
        to = "files" if "nvme" in devices.values() else "host"
        return stage, {"offload_optimizer": optimizer != "none",
                       "offload_parameters": parameters != "none", "offload_to": to}  # fmt: skip

    def precision(self, stage: int) -> tuple[str, LossScale]:
        """Read the format of matrix products, and fp16's loss scale."""
        half, brain = self.flag("fp16", "enabled"), self.flag("bf16", "enabled")
        if half and brain:
            raise self.wrong("fp16.enabled", True, "bf16 is enabled too; nearest: bf16 alone")
        least = 1 if half else 0
        scale = LossScale(
            fixed=self.number("fp16", "loss_scale", 0.0),
            initial=2.0 ** self.whole("fp16", "initial_scale_power", 16),
            window=self.whole("fp16", "loss_scale_window", 1000, least),
            hysteresis=self.whole("fp16", "hysteresis", 2, 1),
            consecutive_hysteresis=self.flag("fp16", "consecutive_hysteresis"),
            least=float(self.whole("fp16", "min_loss_scale", 1, least)),
        )
        if half and not stage:
            if scale.hysteresis != 1 and "hysteresis" in self.block("fp16"):
                self.told.append("fp16.hysteresis: at stage 0 DeepSpeed halves at every overflow")
            scale = replace(scale, hysteresis=1, consecutive_hysteresis=False, stops=False)
        return "fp16" if half else "bf16" if brain else "fp32", scale

    def clip(self, era: str, unsaid: float | None) -> float:
        """Read the largest gradient norm, or its default in that version."""
        if self.config.get("gradient_clipping") is not None:
            return self.number("", "gradient_clipping", 1.0)
        since, found = ".".join(map(str, CLIPS_SINCE)), version(era)
        if era and (not found or found == CLIPS_SINCE[: len(found)] != CLIPS_SINCE):
            raise ConfigError(
                f"era {short(era)}: a version as 0.19.8 is wanted, for gradient_clipping's default "
                f"changed in {since}; nearest: {since}"
            )
        if found:
            clip = 1.0 if found >= CLIPS_SINCE else 0.0
            self.told.append(f"gradient_clipping = {clip}, DeepSpeed {era}'s default")
            return clip
        if unsaid is None:
            raise ConfigError(
                f"{self.where}: gradient_clipping is not said: DeepSpeed takes 0.0 (none) before "
                f"{since}, and 1.0 from it on; nearest: the key in the file, or --era {since}"
            )
        self.told.append(
            f"gradient_clipping is not said: {unsaid} taken (DeepSpeed takes 0.0 before {since}, "
            f"1.0 from it on)"
        )
        return unsaid

    def reduce(self) -> str:
        """Read the format in which gradients travel."""
        value = self.config.get("communication_data_type")
        found = "" if value is None else str(value).lower()
        if found not in ("", "fp32", "bf16"):
            raise self.wrong("communication_data_type", value, "fp32 or bf16; nearest: fp32")
        return found

    def recompute(self) -> tuple[str, ...]:
        """Which keys of activation_checkpointing are on."""
        return tuple(name for name, on in self.block("activation_checkpointing").items() if on)

    def optimizer(self, brought: bool) -> tuple[str, dict[str, Any]]:
        """Read the optimizer's class and arguments, as DeepSpeed would make it."""
        block = self.block("optimizer")
        if not block or brought:
            if block:
                self.told.append("optimizer: the script's own counts, as in DeepSpeed")
            return "", {}
        name, params = block.get("type"), self.block("optimizer.params")
        if "max_grad_norm" in params:
            value = params["max_grad_norm"]
            raise self.wrong("optimizer.params.max_grad_norm", value, "nearest: gradient_clipping")
        args = {key: tuple(v) if isinstance(v, list) else v for key, v in params.items()}
        kind = str(name).lower()
        if kind in ("adam", "adamw"):
            return self._adam(kind, args)
        if kind == "adagrad":
            return "Adagrad", args
        if kind == "lion":
            return "Lion", {**{key: v for key, v in FUSED.items() if key != "eps"}, **args}
        if kind in ELSEWHERE:
            raise self.wrong("optimizer.type", name, f"is not here; nearest: {ELSEWHERE[kind]}")
        if name not in TORCH:
            close = nearest(str(name), TORCH) or next(
                (x for x in TORCH if x.lower() == kind), "AdamW"
            )
            raise self.wrong("optimizer.type", name, f"no such optimizer; nearest: {close}")
        return name, args

    def _adam(self, kind: str, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        decoupled = args.pop("adam_w_mode", True) or kind == "adamw"
        name = "AdamW" if decoupled else "Adam"
        if kind == "adam" and decoupled:
            self.told.append('optimizer.type = "Adam": is AdamW, unless adam_w_mode = false')
        states = args.pop("fp32_optimizer_states", True)
        if args.pop("torch_adam", False):
            decay = 0.01 if decoupled else 0.0
            return name, {**FUSED, "weight_decay": decay, **args}
        kept = {
            "bias_correction": args.pop("bias_correction", True),
            "fp32_optimizer_states": states,
        }
        kept["amsgrad"] = not args.pop("amsgrad", False)
        args.pop("set_grad_none", None)
        for key, as_here in kept.items():
            if not as_here:
                nearest_is = "torch_adam = true" if key == "amsgrad" else f"{key} = true"
                raise self.wrong(
                    f"optimizer.params.{key}", key == "amsgrad", f"nearest: {nearest_is}"
                )
        for key in args:
            if key not in FUSED:
                close = nearest(key, [*FUSED, "adam_w_mode", "torch_adam"])
                hint = f"; nearest: {close}" if close else ""
                raise self.wrong(f"optimizer.params.{key}", args[key], f"no argument of Adam{hint}")
        return name, {**FUSED, **args}

    def scheduler(self, brought: bool) -> tuple[str, dict[str, Any]]:
        """Read the scheduler's class and arguments."""
        block = self.block("scheduler")
        if not block or brought:
            if block:
                self.told.append("scheduler: the script's own counts, as in DeepSpeed")
            return "", {}
        name, params = block.get("type"), self.block("scheduler.params")
        if not isinstance(name, str):
            raise self.wrong("scheduler.type", name, "a name is wanted; nearest: WarmupLR")
        return name, dict(params)
