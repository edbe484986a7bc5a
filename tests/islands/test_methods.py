"""What a method offers besides numbers: names, weights, partners, adoption, and refusals."""

from __future__ import annotations

import pytest
import torch

from shoal.base.errors import ConfigError
from shoal.base.layouts.island_options import METHODS, IslandsPolicy
from shoal.islands.method import MergeMethod
from shoal.islands.methods import PLAIN, find_method
from shoal.islands.methods.noloco import draw_pairs


def method_of(name: str, **keys) -> MergeMethod:
    data = "own" if name == "scaffold" else "shared"
    return find_method(IslandsPolicy(name, count=4, data=data, **keys))


@pytest.mark.parametrize("name", METHODS)
def test_every_named_method_is_there_under_its_name(name: str) -> None:
    method = method_of(name)
    assert method.name == name
    assert method.policy.outer_lr > 0, "open numbers are filled in"
    assert method.resets_inner == (name == "branch-train-merge")
    assert method.pulls == (name in ("fedprox", "scaffold"))
    assert method.common_past == (name != "noloco")
    assert method.keeps == (0.95 if name == "sparse-loco" else 1.0)


def test_no_method_is_left_out() -> None:
    assert {*PLAIN, "noloco"} == set(METHODS)
    with pytest.raises(ConfigError, match="islands.method = diloko: .*try: diloco"):
        find_method(IslandsPolicy("diloko", count=4))
    with pytest.raises(ConfigError, match="islands.method = none: not one of local-sgd, "):
        find_method(IslandsPolicy())


@pytest.mark.parametrize("name", METHODS)
def test_the_whole_model_travels_and_its_last_part_with_the_last_step(name: str) -> None:
    method = method_of(name)
    sizes = {f"blocks.{k}.w": 8 for k in range(4)}
    names = [name for part in method.fragments(sizes) for name in part]
    assert sorted(names) == sorted(sizes)
    assert len(method.fragments(sizes)) == (4 if name == "streaming-diloco" else 1)
    assert method.schedule_fragments(30)[-1].apply_after == 30


def test_sixty_steps_of_a_slow_island_count_as_sixty() -> None:
    tokens = [60 * 512, 240 * 512, 240 * 512, 240 * 512]
    weights, divisor = method_of("diloco").message_weights(tokens, [1.0] * 4, [True] * 4)
    assert weights[1] / weights[0] == 4
    assert divisor == sum(tokens)
    weights, divisor = method_of("diloco", weighting="uniform").message_weights(
        tokens, [1.0] * 4, [True] * 4
    )
    assert (weights, divisor) == ([1.0] * 4, 4)


@pytest.mark.parametrize("name", METHODS)
def test_who_is_not_admitted_is_not_in_the_divisor(name: str) -> None:
    method = method_of(name)
    admitted = [True, False, True, True]
    weights, divisor = method.message_weights([5, 6, 7, 8], [1.0, 1e9, 1.0, 1.0], admitted)
    assert weights[1] == 0
    assert divisor == sum(weights) == (3 if name in ("noloco", "scaffold") else 20)
    assert method.message_weights([5] * 4, [1.0] * 4, [False] * 4) == ([0.0] * 4, 0)


def test_sparse_loco_clips_to_the_median_of_the_admitted() -> None:
    method = method_of("sparse-loco")
    weights, divisor = method.message_weights(
        [1] * 4, [1.0, 2.0, 8.0, 1e9], [True, True, True, False]
    )
    assert (weights, divisor) == ([1, 1, 0.25, 0], 3)
    assert method.message_weights([1] * 4, [0.0] * 4, [True] * 4) == ([1.0] * 4, 4)


def test_adopting_keeps_the_share_that_mixing_says() -> None:
    for mixing, refused, wanted in ((0.0, False, 1.0), (0.25, False, 2.5), (0.25, True, 1.0)):
        method = method_of("diloco", mixing=mixing)
        outer = method.open({"w": torch.ones(3)})
        local = {"w": torch.full((3,), 7.0, dtype=torch.bfloat16)}
        kept = local["w"]
        method.apply_merge(outer, ("w", "on another rank"), local, refused=refused)
        assert kept.tolist() == [wanted] * 3, "in place"


def test_adopting_keeps_what_was_learnt_since_it_left() -> None:
    """Sent as 5, 7 by now, merged to 1: 1 and the 2 on top; with a quarter of the own kept, 4."""
    for mixing, refused, wanted in ((0.0, False, 3.0), (0.25, False, 4.0), (0.0, True, 1.0)):
        method = method_of("diloco", mixing=mixing)
        outer = method.open({"w": torch.ones(3)})
        local = {"w": torch.full((3,), 5.0, dtype=torch.bfloat16)}
        sent = method.sent(outer, ("w", "on another rank"), local)
        assert sent["w"].dtype == torch.float32
        local["w"].fill_(7.0)
        method.apply_merge(outer, ("w", "on another rank"), local, refused=refused, sent=sent)
        assert local["w"].tolist() == [wanted] * 3
    local["w"].fill_(torch.nan)
    method.apply_merge(outer, ("w",), local, refused=False, sent=sent)
    assert local["w"].tolist() == [1.0] * 3, "weights that broke on the way are healed"
    wide = {"w": torch.full((3,), 5.0)}
    sent = method.sent(outer, ("w",), wide)
    wide["w"].fill_(7.0)
    assert sent["w"].tolist() == [5.0] * 3, "a copy, also where no dtype changes"


def test_a_message_is_wide_and_only_of_what_is_here() -> None:
    method = method_of("diloco")
    outer = method.open({"w": torch.ones(3, dtype=torch.bfloat16), "none": torch.zeros(0, 2)})
    local = {"w": torch.full((3,), 0.75, dtype=torch.bfloat16), "none": torch.zeros(0, 2)}
    found = method.message(outer, ("w", "none", "on another rank"), local)
    assert set(found) == {"w", "none"}
    assert found["w"].dtype == torch.float32
    assert found["w"].tolist() == [0.25] * 3  # old minus new
    assert found["none"].shape == (0, 2)


def test_all_merge_with_all_but_in_noloco() -> None:
    assert method_of("diloco").partners(7, 2, 4) == (0, 1, 2, 3)
    method = method_of("noloco")
    for round_number in range(20):
        for index in range(4):
            partners = method.partners(round_number, index, 4)
            assert index in partners
            assert len(partners) == 2
            for other in partners:
                assert method.partners(round_number, other, 4) == partners


def test_pairs_are_drawn_from_seed_and_round() -> None:
    drawn = {(seed, r): draw_pairs(seed, r, 8) for seed in range(3) for r in range(50)}
    assert all(sorted(i for pair in p for i in pair) == list(range(8)) for p in drawn.values())
    assert len({tuple(sorted(p)) for p in drawn.values()}) > 60  # of 105
    met = {pair for r in range(50) for pair in drawn[0, r]}
    assert len(met) == 28, "everybody meets everybody"
    assert draw_pairs(0, 0, 4) == [(0, 1), (2, 3)], "the same draw for ever, on any machine"
    assert draw_pairs(0, 1, 4) == [(1, 3), (0, 2)]
    assert draw_pairs(0, 0, 1) == [(0,)]


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("noloco", {"outer": "adam"}, "islands.outer = adam: noloco .*try: islands.outer=sgd"),
        ("noloco", {"codec": "int8"}, "islands.codec = int8: .*try: islands.codec=none"),
        ("noloco", {"regions": 2}, "islands.regions = 2: .*try: islands.regions=1"),
        ("fedopt", {"outer": "adam"}, "islands.outer = adam: fedopt .*try: islands.server="),
        ("fedopt", {"outer_momentum": 1.0}, "islands.outer_momentum = 1: below 1.*=0.9"),
        ("diloco", {"outer": "sdg"}, "islands.outer = sdg: .*try: sgd"),
    ],
)
def test_what_a_method_cannot_have_is_one_line(name: str, keys: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        method_of(name, **keys)
