"""What a run remembers of its weights, to see whether somebody wrote them beside it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import shoal
from shoal.base.errors import ConfigError
from shoal.fabric import start_world
from shoal.machine.process_memory import trim_heap
from shoal.trainer.guards.checksums import (
    LOOKED_AT,
    SURE,
    ChecksumSnapshot,
    ChecksumValues,
    fingerprint,
)
from shoal.trainer.guards.corruption import CorruptionCheck

MIB = 2**20


def private_bytes() -> int:
    """What this process has in memory of its own."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only: /proc")
def test_weights_on_the_host_are_read_without_a_copy() -> None:
    weights = [torch.ones(144, 72) for _ in range(800)]
    fingerprint(weights[:8])
    trim_heap()
    held = private_bytes()
    fingerprint(weights)
    assert private_bytes() < held + 4 * MIB, "32 MiB of weights"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64])
def test_any_format_counts_with_its_bits_and_its_place(dtype: torch.dtype) -> None:
    one, other = torch.ones(3, 5).to(dtype), torch.zeros(7).to(dtype)
    before = fingerprint([one, other])
    assert 0 <= before < SURE
    assert fingerprint([one.clone(), other.clone()]) == before
    assert fingerprint([other, one]) != before
    one[2, 4] = 0
    assert fingerprint([one, other]) != before


def test_of_large_weights_some_elements_are_read_unless_all_are_wanted() -> None:
    weight = torch.zeros(2 * LOOKED_AT).as_strided((2, LOOKED_AT), (1, 2))
    before, whole = fingerprint([weight]), fingerprint([weight], whole=True)
    weight[0, 1] = 1.0
    assert fingerprint([weight]) == before
    assert fingerprint([weight], whole=True) != whole
    weight[0, 2] = 1.0
    assert fingerprint([weight]) != before


def test_a_step_that_failed_leaves_the_halves_watched() -> None:
    """Nothing of a user's runs within `run.step`, so it is not looked at; later halves are."""
    module = torch.nn.Linear(2, 2)
    right = [lambda y, t: (y - t) ** 2]
    run = shoal.parallelize(
        module, torch.optim.SGD(module.parameters(), lr=0.1), lambda y, t: right[0](y, t),
        world=start_world({}),
    )  # fmt: skip
    batch = (torch.ones(4, 2), torch.zeros(4, 2))
    run.step(batch)
    kept = right[0]

    def fails(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        raise ValueError("by chance")

    right[0] = fails
    with pytest.raises(ValueError, match="by chance"):
        run.step(batch)
    right[0] = kept
    run.forward_backward(batch)
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    with pytest.raises(ConfigError, match="between run.forward_backward and run.update"):
        run.update()


def test_an_error_in_the_update_of_one_run_leaves_the_other_alone() -> None:
    """The loss of one goes through the other's model and gives it gradients, as a GAN's does."""
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (one, other)]
    run = shoal.parallelize(
        one, optimizers[0], lambda y, t: (other(y) - t) ** 2, world=start_world({})
    )
    beside = shoal.parallelize(
        other, optimizers[1], lambda y, t: (y - t) ** 2, world=start_world({})
    )
    fails = [False]

    def hook(*_: object) -> None:
        if fails[0]:
            raise ValueError("by chance")

    optimizers[0].register_step_pre_hook(hook)
    batch = (torch.ones(4, 2), torch.zeros(4, 2))
    run.step(batch)
    fails[0] = True
    with pytest.raises(ValueError, match="by chance"):
        run.step(batch)
    beside.step(batch)


def test_an_allowed_write_each_few_steps_does_not_make_more_checks() -> None:
    """Owners take turns in one run: each begins with a write, and checks have a cost of their own."""
    check = CorruptionCheck.__new__(CorruptionCheck)
    check.on, check.taken, check._next = (
        True,
        ChecksumSnapshot(7, {}, ChecksumValues(0, {}), []),
        40,
    )
    check.discard_checksums(soon=False)
    assert check.taken is None
    check.record_checksums(39)
    assert check.taken is None, "no check is due before step 40"
    check.discard_checksums()
    assert check._next == 0, "the next update is followed by one"
