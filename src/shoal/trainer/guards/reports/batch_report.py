"""Texts about ranks with wrong batches; imported when there is one to print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.base.errors import ConfigError
from shoal.trainer.guards.reports import own_loaders

CURE = "try: run.loader(dataset), which deals it to ranks, or a DistributedSampler in yours"

Told = Sequence[dict[str, Any]]
"""Messages of all ranks about their batches (`BatchConsistencyGuard._told`)."""


def refuse_different_data(step: int, told: Told, layout: str) -> None:
    """Raise ConfigError if ranks read other data than they must; the same on every rank.

    Args:
        step: the current step.
        told: messages of all ranks, by rank.
        layout: its name.
    """
    if len({one["loaded"] for one in told}) > 1:
        raise ConfigError(
            "batch: some ranks bring a batch of run.loader and others one of their own; every "
            "rank must take its batches from the same place"
        )
    first: dict[int, int] = {}
    probe = told[0]["probe"]
    for rank, one in enumerate(told):
        if one["probe"] != probe:
            raise ConfigError(
                f"run.loader: the data differ between rank 0 ({_format_probe(probe)}) and rank "
                f"{rank} ({_format_probe(one['probe'])}): every rank must give the same dataset, "
                f"which run.loader splits over ranks; try: one seed on all ranks before the data "
                f"are made (torch.manual_seed, np.random.default_rng(0)), files in sorted order; a "
                f"dataset that is split over ranks already goes to run.step(batch)"
            )
    for rank, one in enumerate(told):
        other = first.setdefault(one["place"], rank)
        if told[other]["hash"] != one["hash"]:
            raise ConfigError(
                f"step {step}: ranks {other} and {rank} hold different samples, and layout "
                f"{layout} has them work on the same ones; try: run.loader(dataset), or the same "
                f"seed where data are made (torch.manual_seed)"
            )


def refuse_duplicate_samples(step: int, shares: Told, *, by_chance: bool) -> None:
    """Raise ConfigError if all ranks read the whole data, or the same samples.

    Args:
        step: the current step.
        shares: messages of the ranks that must have samples of their own.
        by_chance: whether equal samples may be a coincidence.
    """
    for name, *what in shares[0]["loaders"]:
        if all([name, *what] in other["loaders"] for other in shares[1:]):
            raise ConfigError(
                f"run.step: the DataLoader has a {name}, so each of {len(shares)} ranks would "
                f"train on the whole dataset; {CURE}"
            )
    if by_chance:
        return
    hashes = [one["hash"] for one in shares]
    again = next(place for place, key in enumerate(hashes) if key in hashes[:place])
    raise ConfigError(
        f"step {step}: ranks {hashes.index(hashes[again])} and {again} brought the same "
        f"{shares[again]['samples']} samples, so each would count twice: a loader of your own "
        f"shows every rank the same data; {CURE}"
    )


EPOCH = (
    "batch: a DistributedSampler begins an epoch in the order of the one before, since set_epoch "
    "was not called; try: sampler.set_epoch(epoch) before each epoch, or run.loader(dataset)"
)
"""Notice on epochs that all have the same order."""


def refuse_unlike_loaders(step: int, shares: Told) -> None:
    """Raise ConfigError if ranks' loaders deal different orders, or number classes differently.

    Args:
        step: the current step.
        shares: messages of the ranks that must have samples of their own.
    """
    if all("rows" in one for one in shares):
        _refuse_unlike_samplers(step, shares)
        _refuse_other_labels(step, shares)


def _refuse_unlike_samplers(step: int, shares: Told) -> None:
    """Raise ConfigError if the DistributedSamplers of ranks do not deal one order to all of them.

    Args:
        step: the current step.
        shares: messages of the ranks that must have samples of their own.
    """
    if len({len(one["samplers"]) for one in shares}) > 1:
        return  # loaders that cannot be matched
    for place, first in enumerate(shares[0]["samplers"]):
        known: dict[int, int] = {}
        for rank, share in enumerate(shares):
            one = share["samplers"][place]
            for key in ("samples", "seed", "shuffle", "epoch", "num_replicas", "drop_last"):
                if one[key] != first[key]:
                    raise ConfigError(
                        f"step {step}: the DistributedSampler has {key} = {first[key]} on rank 0 "
                        f"and {one[key]} on rank {rank}: ranks deal from different orders, so some "
                        f"samples come twice and others never; try: the same {key} on every rank, "
                        f"or run.loader(dataset)"
                    )
            other = known.setdefault(one["rank"], rank)
            if other != rank:
                raise ConfigError(
                    f"step {step}: the DistributedSamplers of ranks {other} and {rank} both have "
                    f"rank = {one['rank']}, so both train on the same samples; try: "
                    f"rank=run.rank, or run.loader(dataset)"
                )


def _refuse_other_labels(step: int, shares: Told) -> None:
    """Raise ConfigError if a dataset gives one sample different labels on two ranks.

    Args:
        step: the current step.
        shares: messages of the ranks that must have samples of their own.
    """
    for rank, share in enumerate(shares):
        for first, other in zip(shares[0]["rows"], share["rows"], strict=False):
            found = own_loaders.find_other_labels(first, other)
            if found is not None:
                raise ConfigError(
                    f"step {step}: sample {found[0]} of the DataLoader's dataset has label "
                    f"{found[1]} on rank 0 and {found[2]} on rank {rank}: ranks number classes "
                    f"differently, as in the order of a set; try: sorted(set(names)) where labels "
                    f"are numbered"
                )


def _format_probe(probe: Sequence[Any]) -> str:
    return ", ".join(map(str, probe)) or "nothing"


def batch_size_line(step: int, batch: int, shares: Told, *, may_be: bool) -> str:
    """Return the line for a batch of another size than the user set.

    Args:
        step: the current step.
        batch: samples over all ranks that the user set.
        shares: messages of the ranks that have samples of their own.
        may_be: whether it may be the short last step of an epoch.
    """
    sizes = [one["samples"] for one in shares]
    many = "" if len(shares) == 1 else f" ({' + '.join(map(str, sizes))})"
    line = (
        f"step {step}: batch = {batch} samples over all ranks were asked for, and "
        f"{sum(sizes)}{many} were brought"
    )
    if may_be:
        return f"{line}; a short last step may be so, others are refused"
    return (
        f"{line}; try: run.loader(dataset), which cuts and deals such steps, or "
        f"batch={sum(sizes)}, if each rank brings samples of its own"
    )
