"""Run of a resolved configuration: its model, its loss, and the arguments of `start_run`.

The main job, `shoal compare` and `shoal prove` build the same run from the same sections.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from shoal.base.errors import ConfigError, ShoalError, nearest_word
from shoal.base.plans.plan import Plan
from shoal.base.text.user_frames import user_line
from shoal.config.load import load_config
from shoal.config.paths import add_working_folder, load_function
from shoal.config.resolve import check_model_data
from shoal.config.sections import Config, DataSection, ModelSection
from shoal.data.loading.sample_inspection import first_samples, sample_kind
from shoal.data.sources import Source, open_source
from shoal.fabric import World, start_world
from shoal.forecast.models.model_facts import resolve_model
from shoal.models.catalog import build, find_default_loss
from shoal.optim.build import build_optimizer
from shoal.planning.settle import Words
from shoal.trainer.guards.optimizer_checks import ScheduleLength
from shoal.trainer.parallelize import start_run
from shoal.trainer.run import Run
from shoal.trainer.step.call_contract import Loss


def open_world_and_source(folder: Path) -> tuple[Config, World, Source]:
    """Return the configuration of a run's folder, its processes, and its opened data."""
    config = load_config(folder / "run.toml").config
    world = start_world()
    return config, world, world.run_local_first(lambda: open_source(config.data, config.train.seed))


def open_run(
    config: Config,
    source: Source,
    world: World,
    plan: Plan,
    said: Words | None = None,
    *,
    folder: Path | None = None,
    total_steps: int = 0,
    is_cut_by_user: bool = True,
) -> Run:
    """Start the run that a configuration describes, under a plan.

    Args:
        plan, said: as for `start_run`.
        folder: the run folder; None: write nothing.
        is_cut_by_user: the user fixed the micro-batch, not Shoal.

    Raises:
        PlanError, ConfigError: on all ranks, if this layout cannot train this model.
    """
    add_working_folder()  # torchrun's ranks lack it; the user's optimizer may lie there
    built: list[nn.Module] = []  # the optimizer needs to know which parameters are matrices

    def make_model() -> nn.Module:
        built.append(build_model(config, source))
        return built[0]

    return start_run(
        make_model,
        lambda parameters: build_optimizer(config.optimizer, parameters, built[0]),
        import_loss(config.model),
        plan,
        said,
        given=("batch", "micro_batch") if is_cut_by_user else ("batch",),
        length=ScheduleLength(config.optimizer, total_steps),
        sample=partial(first_samples, source.train, source.collate),
        folder=folder,
        world=world,
    )


def build_model(config: Config, source: Source) -> nn.Module:
    """Build the module of `[model]`, with the adapters of [tune].

    Args:
        source: its vocabulary and kind of data size a model that is named.

    Raises:
        ConfigError: a name, an argument, data or adapters that do not fit.
    """
    model = _build_base_model(config.model, config.data, source)
    if config.tune.adapter == "none":
        return model
    from shoal.trainer.adapters import add_adapters

    return add_adapters(model, config.tune, config.model.name.removeprefix("hf:"))


def _build_base_model(section: ModelSection, data: DataSection, source: Source) -> nn.Module:
    if section.build:
        return _check_packing(call_builder(section.build, section.arguments), section, data)
    on_tokens = source.kind == "tokens"
    kind = "text" if on_tokens else None
    check_model_data(section.name, data.source, lambda: kind or sample_kind(source.train))
    if source.classes:
        _check_images(section, source)
    built = build(
        section.name,
        section.arguments,
        vocabulary=source.vocabulary if on_tokens else None,
        sequence=data.sequence if on_tokens else None,
    )
    return _check_packing(built, section, data)


def _check_images(section: ModelSection, source: Source) -> None:
    """Raise ConfigError for a model of Shoal that was made for other images."""
    from shoal.data.files.image_folders import check_model  # of images in files only

    if section.name.startswith("hf:"):
        return  # its own configuration says what it reads
    channels, size = source.image
    check_model(
        section.name,
        {
            "classes": len(source.classes),
            "image_channels": channels,
            "image_size": size,
            "inputs": channels * size * size,
        },
        resolve_model(section.name, section.arguments).arguments,
    )


def _check_packing(model: nn.Module, section: ModelSection, data: DataSection) -> nn.Module:
    if data.packing == "on":
        from shoal.trainer.packed_rows import check_packing  # of fine-tuning only

        check_packing(model, section.build or section.name, data.sequence)
    return model


def call_builder(path: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Return the module that the user's builder makes from the other keys of [model].

    Raises:
        ConfigError: a key that the builder does not take, a missing one, or an exception of the
            builder, with the user's own line.
    """
    builder = import_object("model.build", path)
    _check_arguments(path, builder, arguments)
    try:
        built: nn.Module = builder(**arguments)
    except ShoalError:
        raise
    except Exception as error:
        place = user_line(error.__traceback__)
        failure = ConfigError(
            f"model.build = {path}: {f'{place}: ' if place else ''}{type(error).__name__}: {error}"
        )
        failure.add_note("".join(traceback.format_exception(error)))  # for the log
        raise failure from error
    return built


def _check_arguments(path: str, builder: Any, arguments: Mapping[str, Any]) -> None:
    try:
        parameters = inspect.signature(builder).parameters
    except (TypeError, ValueError):
        return  # some builtins have none
    kinds = {one.kind for one in parameters.values()}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = {name: one for name, one in parameters.items() if one.kind in by_name}
    for name, value in arguments.items():
        if name not in taken and inspect.Parameter.VAR_KEYWORD not in kinds:
            close = nearest_word(name, taken)
            hint = (
                f"try: model.{close}={value}"
                if close
                else (f"it takes {', '.join(taken) or 'none'}")
            )
            raise ConfigError(f"model.{name}: {path}() takes no argument {name}; {hint}")
    for name, one in taken.items():
        if one.default is inspect.Parameter.empty and name not in arguments:
            raise ConfigError(f"model.{name}: {path}() needs it; try: model.{name}=…")


def import_loss(section: ModelSection) -> Loss:
    """Import `model.loss`; without one return the loss of the named model (cross-entropy)."""
    if section.loss:
        return import_object("model.loss", section.loss)
    return find_default_loss("" if section.build else section.name)


def import_object(key: str, path: str) -> Any:
    """Import the object that `pkg.mod:name` names.

    Raises:
        ConfigError: the import failed; the message has the key, the path and the reason.
    """
    return load_function(path, key)


def count_total_steps(config: Config, source: Source, batch: int) -> int:
    """Return the optimizer steps of the whole run: as configured, or counted from epochs.

    Raises:
        ConfigError: epochs of data without a length.
    """
    if config.train.steps:
        return config.train.steps
    try:
        samples = len(source.train)
    except TypeError:
        raise ConfigError(
            "train.epochs: the data has no length, so its epochs cannot be counted; try: "
            "train.steps=1000"
        ) from None
    return config.train.epochs * -(-samples // batch)
