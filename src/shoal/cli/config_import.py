"""`shoal config`: convert another library's configuration to a run.toml, and report each key.

    shoal config import ds_config.json --processes 8 --era 0.19.8

reads a DeepSpeed configuration as `shoal.neighbours` does, and default_config.yaml of Accelerate's
likewise: a key that Shoal does not support is refused in one line. A setting that run.toml
expresses differently (a schedule's first steps, weight decay on matrices) is written as the nearest
equivalent and reported.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shoal.base.errors import ConfigError, nearest_word, shorten

if TYPE_CHECKING:
    from shoal.neighbours.configs.deepspeed_config import DeepSpeedSettings
    from shoal.neighbours.configs.written_config import KeyVerdict

app = typer.Typer(help="Bring another library's configuration.", no_args_is_help=True)
FILE = typer.Argument(
    ..., metavar="FILE|BASE64", help="DeepSpeed's JSON or HJSON; Accelerate's YAML."
)
PROCESSES = typer.Option(
    0, "--processes", min=0, help="Ranks in all; 0: this machine's, or Accelerate's num_processes."
)
ERA = typer.Option("", "--era", metavar="VERSION", help="DeepSpeed's version, such as 0.19.8.")
OUT = typer.Option(Path("run.toml"), "--out", metavar="FILE", help="What to write.")

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
"""ZeRO stages → names of layouts in run.toml."""

JSON = typer.Option(False, "--json", help="Path, values and report as one JSON document.")
FACADE = "the facade's own"


@app.callback()
def options() -> None:
    """Bring another library's configuration."""


@app.command("import")
def import_(
    file: str = FILE,
    processes: int = PROCESSES,
    era: str = ERA,
    out: Path = OUT,
    as_json: bool = JSON,
) -> None:
    """Write DeepSpeed's or Accelerate's configuration as a run.toml; tell what became of each key.

    Exit status: 0 written, 2 a key or a value that is not here, with the nearest that is.
    """
    from shoal.base.runlog.atomic_files import write_atomically
    from shoal.config.load import load_config
    from shoal.config.save import toml_value

    if out.exists():
        raise ConfigError(f"--out {out}: exists; try: another name, or move it away")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: no folder {out.parent}; try: make it first")
    values, lines = _read_settings(file, processes, era)
    words = {key: toml_value(value) for key, value in values.items()}
    load_config(None, [f"{key}={word}" for key, word in words.items()])  # refuses bad values
    write_atomically(out, _toml_text(words))
    if as_json:
        typer.echo(json.dumps({"path": str(out), "values": values, "report": lines}))
        return
    for line in lines:
        typer.echo(line)
    typer.echo(f"{out}: {' '.join(f'{key}={word}' for key, word in words.items())}")
    typer.echo(f"next: shoal plan {shlex.quote(str(out))} model.build=pkg.mod:function")


def _read_settings(file: str, processes: int, era: str) -> tuple[dict[str, Any], list[str]]:
    """Read a file of either library: (section.key → value, lines that report each key)."""
    from shoal.base.estimates.facts import default_processes, read_machine_facts
    from shoal.neighbours.configs import accelerate_config
    from shoal.neighbours.configs.deepspeed_config import read

    if accelerate_config.is_accelerate_file(file):
        found = accelerate_config.read(file, processes=processes)
        values, lines = found.values, _report_rows(found.verdicts, found.differs, found.told)
        if found.ds_file:
            settings = read(found.ds_file, data_parallel=found.ranks, era=era)
            inside, differs = translate_settings(settings, found.ranks)
            values, lines = {**inside, **values}, [*lines, *report_lines(settings, differs)]
        else:
            lines.append("no batch, optimizer or data is in the file: a run's own hold")
        return values, lines
    ranks = processes or default_processes(read_machine_facts())
    settings = read(file, data_parallel=ranks, era=era)
    values, differs = translate_settings(settings, ranks)
    lines = report_lines(settings, differs)
    if not processes:
        lines.append(f"--processes not given: {ranks}, as this machine has; the batch follows it")
    return values, lines


def _toml_text(words: dict[str, str]) -> str:
    """Return run.toml text with the imported keys by section; a plan chooses all other keys.

    >>> print(_toml_text({"train.batch": "8", "layout.strategy": '"ddp"', "train.steps": "9"}))
    # written by shoal config import
    [train]
    batch = 8
    steps = 9
    <BLANKLINE>
    [layout]
    strategy = "ddp"
    <BLANKLINE>
    """
    sections: dict[str, list[str]] = {}
    for key, word in words.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, [f"[{section}]"]).append(f"{name} = {word}")
    parts = ["\n".join([*lines, ""]) for lines in sections.values()]
    return "\n".join(["# written by shoal config import", *parts])


def report_lines(settings: DeepSpeedSettings, differs: list[str]) -> list[str]:
    """Return the report: each kept key beside its run.toml key, then differences and the rest.

    >>> from shoal.neighbours.configs.deepspeed_config import read
    >>> config = {"train_batch_size": 8, "gradient_clipping": 1, "wall_clock_breakdown": True}
    >>> for line in report_lines(read(config, data_parallel=8), []):
    ...     print(line)
    kept     train_batch_size = 8                              train.batch
    kept     gradient_clipping = 1                             optimizer.clip
    left     wall_clock_breakdown = true                       in no run.toml
    told     train_micro_batch_size_per_gpu = 1, on 8 data-parallel ranks
    told     gradient_accumulation_steps = 1, on 8 data-parallel ranks
    """
    return _report_rows(settings.verdicts, differs, settings.told)


def _report_rows(
    verdicts: Iterable[KeyVerdict], differs: list[str], told: Iterable[str]
) -> list[str]:
    rows = []
    for one in verdicts:
        if one.fate == "honoured" and not isinstance(one.value, dict):
            left = one.words == FACADE
            words = "in no run.toml" if left else one.words
            said = f"{one.path} = {shorten(json.dumps(one.value, default=str))}"
            rows.append(f"{'left' if left else 'kept':<9}{said:<49} {words}")
    return [
        *rows,
        *(f"differs  {line}" for line in differs),
        *(f"told     {line}" for line in told),
    ]


def translate_settings(settings: DeepSpeedSettings, ranks: int) -> tuple[dict[str, Any], list[str]]:
    """Translate settings to keys of run.toml, for `ranks` data-parallel ranks.

    Returns:
        section.key → value, and a line for each setting that a run applies differently.

    Raises:
        ConfigError: no key can express the schedule or the optimizer.
    """
    from shoal.neighbours.configs.written_config import NARROW_BLOCKS

    values: dict[str, Any] = {
        "train.batch": settings.batch,
        "train.micro_batch": settings.micro_batch,
        "launch.processes": ranks,
        "layout.strategy": STRATEGIES[settings.stage] if ranks > 1 else "single",
        "precision.compute": settings.compute,
        "optimizer.clip": settings.clip,
    }
    differs: list[str] = []
    if settings.stage and ranks == 1:
        differs.append(f"zero_optimization.stage = {settings.stage}: one process splits nothing")
    if settings.compute == "bf16":
        values["precision.residual"] = "bf16"
        differs.append(NARROW_BLOCKS)
    if settings.reduce:
        values["precision.reduce"] = settings.reduce
    _translate_loss_scale(settings, values, differs)
    if settings.offload_optimizer or settings.offload_parameters:
        both = "parameters" if settings.offload_parameters else "optimizer"
        values |= {"memory.offload": both, "memory.offload_to": settings.offload_to}
        if both == "parameters" and not settings.offload_optimizer:
            differs.append("offload_param: the optimizer's state waits on the host, too")
    if settings.drop_last:
        differs.append("dataloader_drop_last: an epoch's last step holds what is left")
    if settings.recompute:
        differs.append(
            f"activation_checkpointing.{settings.recompute[0]}: for models that call it; for any: "
            f"memory.recompute=full"
        )
    curves = [one.path.partition(".")[0] for one in settings.verdicts if one.value is True]
    sinks = {"tensorboard": "shoal.sinks:TensorBoard", "wandb": "shoal.sinks:WandB"}
    if on := [sink for block, sink in sinks.items() if block in curves]:
        values["train.on"] = on
    _translate_optimizer(settings, values, differs)
    _translate_schedule(settings, values, differs)
    return values, differs


def _translate_loss_scale(
    settings: DeepSpeedSettings, values: dict[str, Any], differs: list[str]
) -> None:
    if settings.compute != "fp16":
        return
    if settings.loss_scale.fixed:
        values["precision.loss_scale"] = settings.loss_scale.fixed
        return
    moves = [one.path for one in settings.verdicts if one.words.endswith("how it moves")]
    if moves := [path for path in moves if path != "fp16.loss_scale"]:
        differs.append(f"{', '.join(moves)}: a run finds and follows a loss scale of its own")


def _translate_optimizer(
    settings: DeepSpeedSettings, values: dict[str, Any], differs: list[str]
) -> None:
    if not settings.optimizer:
        differs.append("optimizer: none in the file, so a run's defaults hold; set optimizer.lr")
        return
    args = dict(settings.optimizer_args)
    plain = {"AdamW": (1e-3, 0.01), "Adam": (1e-3, 0.0)}
    lr, decay = plain.get(settings.optimizer, (None, 0.0))
    if (lr := args.pop("lr", lr)) is None:
        raise ConfigError("optimizer.params.lr: is not said; try: torch's own default, written")
    values["optimizer.name"] = settings.optimizer.lower()
    values["optimizer.lr"] = lr
    values["optimizer.weight_decay"] = args.pop("weight_decay", decay)
    values["optimizer.betas"] = list(args.pop("betas", (0.9, 0.999)))
    momentum = args.pop("momentum", 0.0)
    if settings.optimizer == "SGD":
        values["optimizer.momentum"] = momentum
    elif momentum:
        args["momentum"] = momentum
    if values["optimizer.weight_decay"]:
        differs.append("optimizer.params.weight_decay: a run decays matrices only, no norm or bias")
    if args.get("eps") == 1e-8:
        del args["eps"]
    for name, value in args.items():
        differs.append(f"optimizer.params.{name} = {value}: a run takes torch's own default")


def _translate_schedule(
    settings: DeepSpeedSettings, values: dict[str, Any], differs: list[str]
) -> None:
    args, name = settings.scheduler_args, settings.scheduler
    if any(isinstance(value, list) for value in args.values()):
        raise ConfigError(f"scheduler.params: {name} has a list, and a run one rate; try: one")
    rise = args.get("warmup_num_steps", 0)
    lr, total = values.get("optimizer.lr", 1e-3), args.get("total_num_steps", 0)
    if not name:
        found = ("constant", lr, "")
    elif name == "WarmupLR":
        peak = args["warmup_max_lr"]
        found = ("constant", lr if peak is None else peak, "in two steps fewer, linearly")
    elif name == "WarmupDecayLR":
        found = ("linear", args["warmup_max_lr"], "in two steps fewer, linearly, and so falls")
    elif name == "WarmupCosineLR":
        found = ("cosine", lr, "in two steps fewer, linearly, and falls to a tenth")
    elif name == "OneCycle":
        first, second = args["cycle_first_step_size"], args["cycle_second_step_size"]
        total = int(first + (first if second is None else second))
        found = ("one-cycle", args["cycle_max_lr"], "over 30 % from 1/25, and falls to 1/10⁴")
    else:
        close = "shoal find lr" if name == "LRRangeTest" else _nearest_schedule(name)
        raise ConfigError(f"scheduler.type = {name}: no run.toml says it; try: {close}")
    values |= {"optimizer.schedule": found[0], "optimizer.lr": found[1]}
    values["optimizer.warmup_steps"] = max(2, rise) if rise else 0
    if total:
        values["train.steps"] = total
    if found[2]:
        differs.append(f"scheduler.type = {name}: a run's {found[0]} rises {found[2]}")


def _nearest_schedule(name: str) -> str:
    """Return the name of the schedule of a run that is most similar to one of torch's."""
    alike = {"CosineAnnealingLR": "cosine", "OneCycleLR": "one-cycle", "ConstantLR": "constant"}
    return f"optimizer.schedule={alike.get(nearest_word(name, alike) or '', 'linear')}"
