"""Read a DeepSpeed configuration into `DeepSpeedSettings` with Shoal's meaning of each key.

It may be a dict, a file of HJSON, or url-safe base64. Numbers are DeepSpeed's own: the batch
equation with its floor divisions (`train_batch_size` = micro-batch × accumulation × data-parallel
size), "Adam" that is AdamW without decay, clipping at 1.0 from 0.19.3 on and none before, "auto"
that is a default wherever DeepSpeed or its users' trainers have one. Every other key is reported
or refused: deepspeed_keys.txt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError, check_choice, nearest_word, shorten
from shoal.neighbours.configs.deepspeed_rates import SCHEDULES
from shoal.neighbours.configs.written_config import (
    KeyVerdict,
    WrittenConfig,
    format_ignored_keys,
    load_written,
    parse_version,
    read_table,
)

CLIPS_SINCE = "0.19.3"
"""First version in which `gradient_clipping`, if absent, is 1.0; before, 0.0 (none)."""

TORCH = ("Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop",
         "SGD")  # fmt: skip
"""Classes of torch.optim that DeepSpeed makes by their own names, and that need no closure."""

TORCH_RATES = ("ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR",
               "ExponentialLR", "LinearLR", "MultiStepLR", "OneCycleLR", "PolynomialLR",
               "StepLR")  # fmt: skip
"""Classes of torch.optim.lr_scheduler that need no function."""

ELSEWHERE = {
    **dict.fromkeys(
        ("onebitadam", "zerooneadam", "onebitlamb"),
        "AdamW, with layout.compress=one-bit:STEPS in the place of freeze_step",
    ),
    **dict.fromkeys(("muadam", "muadamw", "musgd"), "AdamW, or mup's own, made by the script"),
    "lamb": "AdamW, or shoal.optim.lamb:LAMB, made by the script, which clamps no ratio",
    "muon": "AdamW, or shoal.optim.muon:MuonWithAdamW, made by the script",
    "lbfgs": "AdamW: LBFGS calls the model itself",
    "sparseadam": "AdamW: gradients travel dense",
}
"""Refused optimizers, in lower case → the nearest."""

CURVES_SINCE = (0, 19, 4)
"""First version of today's curves. WarmupLR's default peak was 0.001 before."""

MONITORS = ("tensorboard", "csv_monitor", "wandb")
"""Blocks that name where curves go."""

FILLED_IN = ("lr", "warmup_num_steps", "total_num_steps", "type")
"""Last words of keys whose "auto" only the trainer can fill in."""


@dataclass(frozen=True)
class LossScaleSettings:
    """Settings of fp16's dynamic loss scale, with the rules of DeepSpeed's scalers.

    Attributes:
        fixed: a constant scale; 0: dynamic.
        initial: the first one.
        window: clean steps after which the next one doubles it.
        least: below which it does not go.
        hysteresis: overflows until it halves: 2 ignores the first one; stage 0 has 1.
        consecutive_hysteresis: that count starts anew at every clean step, not only when the scale
            doubles.
        stops: an overflow at `least` ends the run (stages 1 to 3).
    """

    fixed: float = 0.0
    initial: float = 65536.0
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    least: float = 1.0
    stops: bool = True

    def doubles(self, clean: int) -> bool:
        """Return whether the scale doubles after `clean` clean steps since start or overflow.

        >>> [clean for clean in range(1, 12) if LossScaleSettings(window=3).doubles(clean)]
        [4, 7, 10]
        """
        return clean > 1 and (clean - 1) % self.window == 0


@dataclass(frozen=True)
class DeepSpeedSettings:
    """Settings of a DeepSpeed configuration, with every "auto" and default resolved.

    batch = micro_batch × accumulate × data-parallel size · stage  of ZeRO, 0 to 3

    Attributes:
        offload_to: host or files (nvme).
        compute: fp32, bf16, fp16.
        clip: 0: none.
        optimizer: a class of torch.optim, or Lion; "" none is configured, the script passes its
            own.
        optimizer_args, scheduler_args: keyword arguments, of DeepSpeed's meaning and defaults.
        scheduler: of `deepspeed_rates.SCHEDULES`, or a class of torch.optim.lr_scheduler; "" none.
        reduce: dtype in which gradients are reduced: fp32, bf16; "" their own.
        monitors: blocks of the monitors, by name, with defaults filled in.
        recompute: enabled keys of activation_checkpointing: for models that ask for them.
        verdicts: on every key of the configuration.
        told: lines for the user.
    """

    batch: int
    micro_batch: int
    accumulate: int
    stage: int = 0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    offload_to: str = "host"
    compute: str = "fp32"
    loss_scale: LossScaleSettings = LossScaleSettings()
    clip: float = 1.0
    optimizer: str = ""
    optimizer_args: dict[str, Any] = field(default_factory=dict)
    scheduler: str = ""
    scheduler_args: dict[str, Any] = field(default_factory=dict)
    reduce: str = ""
    monitors: dict[str, dict[str, Any]] = field(default_factory=dict)
    recompute: tuple[str, ...] = ()
    drop_last: bool = False
    steps_per_print: int = 0
    wall_clock_breakdown: bool = False
    verdicts: tuple[KeyVerdict, ...] = ()
    told: tuple[str, ...] = ()


def read(
    config: Mapping[str, Any] | str | Path,
    *,
    data_parallel: int,
    era: str = "",
    unsaid_clip: float | None = None,
    brought: Collection[str] = (),
) -> DeepSpeedSettings:
    """Read a configuration for a number of data-parallel ranks.

    Args:
        config: a dict, the path of a file, or url-safe base64 of one.
        era: DeepSpeed's version, as 0.19.8: decides the default of clipping, and which keys are
            gone.
        unsaid_clip: used, with a line, if neither `gradient_clipping` nor a version is known; None
            refuses such a configuration.
        brought: "optimizer", "scheduler": objects that the script passes itself, which then count.

    Raises:
        ConfigError: one line: not readable, an unknown key, a key for a feature that Shoal lacks, a
            value that DeepSpeed refuses, or batches that do not multiply.
    """
    where = "ds_config" if isinstance(config, Mapping) else shorten(str(config))
    found, table = load_written(config, where), read_table("deepspeed_keys")
    reader = _DeepSpeedReader(found, where, "DeepSpeed", parse_version(era), table)
    reader.resolve_auto()
    verdicts = [*reader.judge()]
    parts = {
        **reader.batches(data_parallel),
        **reader.zero(),
        "reduce": reader.reduce(),
        "clip": reader.clip(era, unsaid_clip),
        "monitors": {name: reader.whole_block(name) for name in MONITORS},
        "drop_last": reader.value("dataloader_drop_last"),
        "steps_per_print": reader.value("steps_per_print"),
        "wall_clock_breakdown": reader.value("wall_clock_breakdown"),
    }
    asked = reader.block("activation_checkpointing").items()
    parts["recompute"] = tuple(name for name, on in asked if on)
    parts |= reader.precision(parts["stage"])
    compute, sums = parts["compute"], reader.block("data_types").get("grad_accum_dtype")
    if compute != "fp32" and parts["accumulate"] > 1 and not sums:
        said = f"DeepSpeed adds gradients up in {compute}, Shoal in fp32"
        reader.told.append(f"data_types.grad_accum_dtype is not said: {said}")
    for block, made in (("optimizer", reader.optimizer), ("scheduler", reader.scheduler)):
        if reader.block(block) and block in brought:
            reader.told.append(f"{block}: the script's own counts, as in DeepSpeed")
        elif reader.block(block):
            parts[block], parts[f"{block}_args"], more = made()
            verdicts += more
    told = (*reader.told, *format_ignored_keys(verdicts))
    return DeepSpeedSettings(**parts, verdicts=tuple(verdicts), told=told)


@dataclass
class _DeepSpeedReader(WrittenConfig):
    """Reader of the parts of `DeepSpeedSettings`; collects lines for the user."""

    told: list[str] = field(default_factory=list)

    def resolve_auto(self) -> None:
        """Convert old forms to today's, and replace every "auto" by the key's default."""
        if "bfloat16" in self.config and "bf16" not in self.config:
            self.config["bf16"] = self.config.pop("bfloat16")
        if isinstance(stage := self.config.get("zero_optimization"), bool):
            self.config["zero_optimization"] = {"stage": int(stage)}
            self.told.append(f"zero_optimization = {str(stage).lower()}: stage {int(stage)}")
        auto: list[str] = []
        self.config = self._without_auto(self.config, "", auto)
        if "gradient_clipping" in auto:
            auto.remove("gradient_clipping")
            self.config["gradient_clipping"] = 1.0
            self.told.append('gradient_clipping = "auto": 1.0, as Accelerate fills it in')
        if auto:
            self.told.append(f'"auto" is what holds without the key: {", ".join(auto)}')

    def _without_auto(self, block: Mapping[str, Any], at: str, auto: list[str]) -> dict[str, Any]:
        kept = {}
        for name, value in block.items():
            if isinstance(value, Mapping):
                kept[name] = self._without_auto(value, f"{at}{name}.", auto)
            elif value != "auto":
                kept[name] = value
            elif at.startswith(("optimizer.", "scheduler.")) and name in FILLED_IN:
                why = "only the trainer that fills it in knows it; try: the value itself"
                raise self.make_error(f"{at}{name}", value, why)
            else:
                auto.append(f"{at}{name}")
        return kept

    def batches(self, ranks: int) -> dict[str, int]:
        """Solve DeepSpeed's batch equation: floor divisions, then equality."""
        names = ("train_batch_size", "train_micro_batch_size_per_gpu",
                 "gradient_accumulation_steps")  # fmt: skip
        batch, micro, steps = (self.value(name) for name in names)
        said = ", ".join(f"{name} = {self.config[name]}" for name in names if self.config.get(name))
        if not batch and not micro:
            more = "says no number of samples; try: train_micro_batch_size_per_gpu = 1"
            raise ConfigError(f"{self.where}: {said or 'no batch size'}: {more}")
        if batch and micro:
            steps = steps or batch // micro // ranks
        steps = steps if batch and micro else steps or 1
        micro = micro or batch // ranks // steps
        batch = batch or micro * steps * ranks
        if batch != micro * steps * ranks:
            raise ConfigError(
                f"{self.where}: {said}: {batch} ≠ micro-batch {micro} × accumulation {steps} × "
                f"{ranks} data-parallel ranks; try: train_batch_size = "
                f"{max(1, micro) * max(1, steps) * ranks}"
            )
        for name, value in zip(names, (batch, micro, steps), strict=True):
            if not self.config.get(name):
                self.told.append(f"{name} = {value}, on {ranks} data-parallel ranks")
        return {"batch": batch, "micro_batch": micro, "accumulate": steps}

    def zero(self) -> dict[str, Any]:
        """Read ZeRO's stage, and the offloaded states with their targets."""
        zero, devices = "zero_optimization", []
        if (stage := self.value(f"{zero}.stage")) > 3:
            raise self.make_error(f"{zero}.stage", stage, "0, 1, 2 or 3 is wanted; try: 3")
        for new, old, least in (("offload_optimizer", "cpu_offload", 1),
                                ("offload_param", "cpu_offload_param", 3)):  # fmt: skip
            device = str(self.value(f"{zero}.{new}.device"))
            check_choice(f"{self.where}: {zero}.{new}.device", device, ("none", "cpu", "nvme"))
            if self.value(f"{zero}.{old}"):
                if self.block(f"{zero}.{new}"):
                    raise self.make_error(f"{zero}.{old}", True, f"is {new}'s old name; try: {new}")
                device = "cpu"
            if device != "none" and stage < least:
                self.told.append(f"{zero}.{new}: nothing below stage {least}, as in DeepSpeed")
                device = "none"
            devices.append(device)
        return {
            "stage": stage,
            "offload_optimizer": devices[0] != "none",
            "offload_parameters": devices[1] != "none",
            "offload_to": "files" if "nvme" in devices else "host",
        }

    def precision(self, stage: int) -> dict[str, Any]:
        """Read the dtype of matrix products, and fp16's loss scale."""
        half, brain = self.value("fp16.enabled"), self.value("bf16.enabled")
        if half and brain:
            raise self.make_error("fp16.enabled", True, "bf16 is enabled too; try: bf16 alone")
        fixed, power, window, hysteresis, least, consecutive = (
            self.value(f"fp16.{name}")
            for name in ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
                         "min_loss_scale", "consecutive_hysteresis")
        )  # fmt: skip
        if half and not fixed and not (window and least):
            raise self.make_error(
                "fp16.loss_scale_window, min_loss_scale", [window, least], "above 0"
            )
        scale = LossScaleSettings(fixed, 2.0**power, window, hysteresis, consecutive, float(least))
        if half and not stage:
            if self.block("fp16").get("hysteresis", 1) != 1:
                self.told.append("fp16.hysteresis: at stage 0 DeepSpeed halves at every overflow")
            scale = replace(scale, hysteresis=1, consecutive_hysteresis=False, stops=False)
        return {"compute": "fp16" if half else "bf16" if brain else "fp32", "loss_scale": scale}

    def whole_block(self, block: str) -> dict[str, Any]:
        """Return a block's keys with their values or defaults."""
        names = [path.partition(".")[2] for path in self.table if path.startswith(f"{block}.")]
        return {name: self.value(f"{block}.{name}") for name in names}

    def clip(self, era: str, unsaid: float | None) -> float:
        """Read the largest gradient norm, or its default in that version."""
        if (said := self.value("gradient_clipping")) is not None:
            return float(said)
        changed = parse_version(CLIPS_SINCE)
        if era and (not self.era or self.era == changed[: len(self.era)] != changed):
            raise ConfigError(
                f"era {shorten(era)}: a whole version is wanted, since gradient_clipping's default "
                f"changed in {CLIPS_SINCE}; try: {CLIPS_SINCE}"
            )
        both = f"DeepSpeed takes 0.0 (none) before {CLIPS_SINCE}, and 1.0 from it on"
        if not self.era and unsaid is None:
            raise ConfigError(
                f"{self.where}: gradient_clipping is not said: {both}; try: the key in the "
                f"file, or --era {CLIPS_SINCE}"
            )
        found = unsaid if unsaid is not None and not self.era else float(self.era >= changed)
        by = f", the default of {era}" if self.era else ""
        self.told.append(f"gradient_clipping is not said: {found}{by} ({both})")
        return found

    def reduce(self) -> str:
        """Read the dtype in which gradients are reduced."""
        found = str(self.value("communication_data_type") or "").lower()
        if found not in ("", "fp32", "bf16"):
            raise self.make_error("communication_data_type", found, "fp32 or bf16; try: fp32")
        return found

    def optimizer(self) -> tuple[str, dict[str, Any], list[KeyVerdict]]:
        """Read the optimizer's class and arguments, as DeepSpeed would make it."""
        name, params = self.block("optimizer").get("type"), self.block("optimizer.params")
        kind = str(name).lower()
        if norm := params.get("max_grad_norm"):
            raise self.make_error("optimizer.params.max_grad_norm", norm, "try: gradient_clipping")
        if kind in ("adam", "adamw") and params.get("torch_adam"):
            decays = kind == "adamw" or params.get("adam_w_mode", True)
            gone = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
            mine = {key: value for key, value in params.items() if key not in gone}
            return "AdamW" if decays else "Adam", mine, []  # torch's own arguments and defaults
        if kind in ("adam", "adamw", "lion"):
            args, verdicts = self.arguments("optimizer", "Lion" if kind == "lion" else "Adam")
            args["betas"] = tuple(args["betas"])
            args.pop("torch_adam", None)
            decays = args.pop("adam_w_mode", True) or kind == "adamw"
            if kind == "adam" and decays:
                self.told.append('optimizer.type = "Adam": AdamW, unless adam_w_mode = false')
            return "Lion" if kind == "lion" else "AdamW" if decays else "Adam", args, verdicts
        if kind in ELSEWHERE:
            raise self.make_error("optimizer.type", name, f"is not here; try: {ELSEWHERE[kind]}")
        name = "Adagrad" if kind == "adagrad" else name
        if name not in TORCH:
            lower = {one.lower(): one for one in (*TORCH, "Adam", "AdamW", "Lion")}
            close = lower[nearest_word(kind, lower) or "adamw"]
            raise self.make_error("optimizer.type", name, f"no such optimizer; try: {close}")
        return name, {key: tuple(v) if isinstance(v, list) else v for key, v in params.items()}, []

    def scheduler(self) -> tuple[str, dict[str, Any], list[KeyVerdict]]:
        """Read the scheduler's class and arguments."""
        name = str(self.block("scheduler").get("type"))
        if name in TORCH_RATES:
            return name, self.block("scheduler.params"), []
        check_choice(f"{self.where}: scheduler.type", name, SCHEDULES)
        args, verdicts = self.arguments("scheduler", name)
        first = {key: v[0] if isinstance(v, list) and v else v for key, v in args.items()}
        SCHEDULES[name](0.0, 0, first)  # refuses what it cannot take
        if name == "WarmupLR" and args["warmup_max_lr"] is None and self.era < CURVES_SINCE:
            args["warmup_max_lr"] = 0.001 if self.era else None
            peak = "0.001" if self.era else "the optimizer's own rate; before 0.19.4 it was 0.001"
            self.told.append(f"scheduler.params.warmup_max_lr is not said: {peak}")
        elif name in ("OneCycle", "WarmupCosineLR") and () < self.era < CURVES_SINCE:
            self.told.append(f"scheduler: {name} as from 0.19.4 on; its stairs or end were others")
        return name, args, verdicts
