"""Fragments: every parameter in exactly one, balanced; and when they travel."""

from __future__ import annotations

import random

import pytest

from shoal.base.errors import ConfigError
from shoal.islands.fragments import block_of, partition_parameters, schedule_fragments


def transformer(blocks: int, block_bytes: int = 100, embedding: int = 150) -> dict[str, int]:
    sizes = {"embed.weight": embedding}
    for k in range(blocks):
        sizes[f"blocks.{k}.attention.weight"] = block_bytes * 2 // 5
        sizes[f"blocks.{k}.mlp.0.weight"] = block_bytes * 3 // 5
    return {**sizes, "norm.weight": 1, "head.weight": embedding}


def test_blocks_are_strided() -> None:
    dealt = partition_parameters(transformer(12, embedding=1), 4)
    for p, names in enumerate(dealt):
        numbers = {block_of(name)[1] for name in names if name.startswith("blocks")}
        assert numbers == {p, p + 4, p + 8}


def test_what_is_in_no_block_goes_to_the_lightest() -> None:
    sizes = transformer(5, embedding=120)
    dealt = partition_parameters(sizes, 4)  # blocks 0 and 4 make fragment 0 the heaviest
    weights = [sum(sizes[name] for name in names) for names in dealt]
    assert sorted(weights) == [101, 200, 220, 220]
    assert "embed.weight" not in dealt[0]


def test_layers_with_two_digits_are_in_order() -> None:
    names = [f"h.{k}.w" for k in range(12)]
    assert partition_parameters(dict.fromkeys(names, 1), 2)[0] == tuple(sorted(names[::2]))


def test_two_stacks_are_strided_each_in_its_turn() -> None:
    sizes = {f"{stack}.{k}.w": 1 for stack in ("encoder", "decoder") for k in range(2)}
    assert partition_parameters(sizes, 2) == (
        ("decoder.0.w", "encoder.0.w"),
        ("decoder.1.w", "encoder.1.w"),
    )


def any_model(seed: int) -> dict[str, int]:
    draw = random.Random(seed)
    names = [f"loose{k}.weight" for k in range(draw.randint(0, 5))]
    for stack in range(draw.randint(0, 2)):
        for k in range(draw.randint(1, 9)):
            names += [f"stack{stack}.{k}.{j}.w" for j in range(draw.randint(1, 3))]
    return {name: draw.choice([0, 1, 8, draw.randint(0, 10_000)]) for name in names or ["w"]}


@pytest.mark.parametrize("seed", range(200))
def test_every_parameter_is_in_exactly_one_fragment(seed: int) -> None:
    sizes = any_model(seed)
    for fragments in range(1, min(7, len(sizes)) + 1):
        dealt = partition_parameters(sizes, fragments)
        assert len(dealt) == fragments
        assert all(dealt), "a fragment is empty"
        assert sorted(name for names in dealt for name in names) == sorted(sizes)
        shuffled = list(sizes.items())
        random.Random(seed + 1).shuffle(shuffled)
        assert partition_parameters(dict(shuffled), fragments) == dealt


def test_fewer_parameters_than_fragments_is_one_line() -> None:
    words = "islands.fragments = 3: the model has 2 parameters to deal; try: islands.fragments=2"
    with pytest.raises(ConfigError, match=words):
        partition_parameters({"a": 1, "b": 1}, 3)
    assert partition_parameters({}, 1) == ((),)


@pytest.mark.parametrize("fragments", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("overlap", [0, 1, 3, 50])
def test_moments_lie_in_the_round_one_at_a_time(fragments: int, overlap: int) -> None:
    for steps in (1, 2, 3, 5, 12, 30, 500):
        found = schedule_fragments(steps, fragments, overlap)
        assert [m.fragment for m in found] == list(range(fragments))
        assert found[-1].apply_after == steps
        before = 1
        for m in found:
            assert before <= m.send_after <= m.apply_after <= steps
            assert m.apply_after == max(1, (m.fragment + 1) * steps // fragments)
            before = m.apply_after
        if overlap < steps // fragments:  # nothing had to give way
            assert all(m.apply_after - m.send_after == overlap for m in found)
