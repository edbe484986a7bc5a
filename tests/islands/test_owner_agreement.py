"""What a person can get wrong with owners is one line; what owners must have in common is compared."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.base.errors import ConfigError, TrainingError
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.base.plans.tensor_shards import Shard
from shoal.config.load import LoadedConfig, load_config
from shoal.config.owners import (
    list_data_sections,
    list_owner_names,
    name_owner,
    resolve_owners,
)
from shoal.config.resolve import resolve_islands
from shoal.config.trust import _list_functions
from shoal.fabric.islands.inter_island_group import IslandLost
from shoal.islands.admission import RefusalCounter
from shoal.islands.methods import find_method
from shoal.islands.owner_schedule import OwnerSchedule
from shoal.trainer.islands.island_job import name_lost_owners
from shoal.trainer.islands.island_join import check_same_tokenizer
from shoal.trainer.islands.owner_data import (
    agree_on_owners,
    describe_text,
    find_worst_owner,
    merge_validations,
    share_tokenizer,
)
from shoal.trainer.islands.owner_rounds import OwnerRounds, _describe_choices
from shoal.trainer.islands.owner_states import OwnerStates

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "federated.md"
OWN = ("islands.data=own", "islands.method=fedavg")
FILES = "data.source=jsonl:owners/{owner}.jsonl"


@pytest.fixture(autouse=True)
def hospitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owners").mkdir()
    for name in ("north", "east", "south"):
        (tmp_path / "owners" / f"{name}.jsonl").write_text('{"text": "a"}\n')
    monkeypatch.chdir(tmp_path)


def settled(*words: str) -> LoadedConfig:
    loaded = load_config(None, words)
    resolve_islands(loaded)
    resolve_owners(loaded)
    return loaded


@pytest.mark.parametrize(
    "words",
    [
        ("islands.data=own",),
        ("data.source=jsonl:owners/east.jsonl", *OWN),
        (FILES, *OWN, "islands.count=4"),
        (FILES,),
    ],
)
def test_the_page_shows_what_shoal_answers(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        settled(*words)
    shown = re.findall(r"^\| .* \| `(.*)` \|$", PAGE.read_text(), re.MULTILINE)
    assert sum(line in str(caught.value) for line in shown) == 1, str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("data.split=even",), "gives each owner data of its own; try: islands.data=own"),
        ((FILES, "data.split=even", *OWN), "has one for each; try: leave data.split out"),
        (("data.source=digits", "data.split=evn", *OWN), "dirichlet:0.1 is wanted; try: data.spl"),
        (("data.source=digits", "data.split=labels:0", *OWN), "try: data.split=labels:1"),
        ((FILES, *OWN, "data.owners=os:system"), "'os:system' is no plain name; try: letters"),
        ((FILES.replace("owners/", "owner/"), *OWN), "no file matches; try: jsonl:owners/*.jsonl"),
        ((FILES, *OWN, "islands.count=5"), "try: islands.count=3, or add the data of 2 more owners"),
        ((FILES, *OWN, "data.owners=north,west"),
         "jsonl:owners/west.jsonl: owner west has no file there; try: put the data of west there"),
        ((FILES, *OWN, "data.owners=north,west", "islands.at=10.0.0.1:29400", "islands.count=3"),
         "data.owners names 2 owners (north, west); try: islands.count=2"),
        ((FILES, *OWN, "data.owners=north,west", "islands.at=10.0.0.1:29400", "islands.count=2",
          "islands.index=1"), "owner west has no file there"),
        ((FILES, *OWN, "data.owners=north,east,north"), "north more than once; try: data.owners=north,e"),
        ((FILES, *OWN, "islands.at=10.0.0.1:29400", "islands.concurrent=2", "islands.count=3"),
         "are on one machine, and islands.at"),
        (("data.source=phones.{owner}:data", *OWN, "islands.count=3"),
         "phones.{owner}:data: of owner 0 it is phones.0:data, and that names no function; try: "
         "data.source=phones.p{owner}:data, or names in data.owners"),
        (("data.source=of_{owner}:data", *OWN, "data.owners=ab,a-b"),
         "of owner a-b it is of_a-b:data, and that names no function; try: names of letters, digits"),
        ((FILES, *OWN, "islands.merge=trimmed"), "(islands.count = 3); try: islands.trim=0.334"),
    ],
)  # fmt: skip
def test_one_line_with_the_nearest_right_value(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settled(*words)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_name_and_count_the_owners() -> None:
    loaded = settled(FILES, *OWN)
    assert loaded.config.islands.count == 3
    assert list_owner_names(loaded.config) == ("east", "north", "south")
    sources = [section.source for section in list_data_sections(loaded.config)]
    assert sources == [f"jsonl:owners/{name}.jsonl" for name in ("east", "north", "south")]
    for number in (10, 9):
        Path(f"of-{number}-x").mkdir()
    folders = settled("data.source=tokens:of-{owner}-x", *OWN).config
    assert list_owner_names(folders) == ("9", "10")
    apart = settled(FILES, *OWN, "islands.at=10.0.0.1:29400", "islands.count=3", "islands.index=2")
    assert list_owner_names(apart.config) == ("0", "1", "2")
    assert [one.source for one in list_data_sections(apart.config)] == ["jsonl:owners/2.jsonl"]
    named = settled("data.source=mine:of_{owner}", *OWN, "data.owners=a,b").config
    assert (named.islands.count, list_owner_names(named)) == (2, ("a", "b"))
    modules = settled("data.source=mine.{owner}:data", *OWN, "data.owners=a,b").config
    assert share_tokenizer(modules, Path("run"), None) is modules, "mine.0:data is no source"  # type: ignore[arg-type]


def test_a_missing_function_is_named_with_its_owner() -> None:
    """A similar module is another owner's, so the line suggests none."""
    config = settled("data.source=mine.{owner}:data", *OWN, "data.owners=a,b").config
    section = list_data_sections(config)[1]
    error = ConfigError("data.source = mine.b:data: there is no module mine.b; try: mine.a")
    assert str(name_owner(config, section, error)) == (
        "owner b: data.source = mine.b:data: there is no module mine.b; try: add the function of "
        "b, or change the names in data.owners"
    )
    files = settled(FILES, *OWN).config
    assert name_owner(files, list_data_sections(files)[0], error) is error


def test_two_owners_with_one_file_are_refused_and_equal_files_noticed() -> None:
    Path("owners/north.jsonl").write_text('{"text": "b"}\n')
    Path("owners/east.jsonl").write_text('{"text": "longer"}\n')
    assert settled(FILES, *OWN).notices == []
    Path("owners/west.jsonl").write_text('{"text": "longer"}\n')
    (line,) = settled(FILES, *OWN).notices
    assert "owners/west.jsonl of owner west is equal to owners/east.jsonl of owner east" in line
    Path("owners/west.jsonl").unlink()
    Path("owners/west.jsonl").symlink_to("east.jsonl")
    with pytest.raises(ConfigError, match="owners east and west have the same file .*east.jsonl"):
        settled(FILES, *OWN)


def test_a_function_of_an_owner_is_code_of_a_run() -> None:
    """Otherwise another user's run.toml would be called unasked."""
    loaded = load_config(None, ["data.source=mine:of_{owner}", *OWN])
    assert any("mine:of_{owner}" in text for text in _list_functions(loaded, "command line"))


def test_a_period_of_epochs() -> None:
    config = load_config(None, ["islands.period=2 epochs", *OWN]).config
    assert (config.islands.epochs, config.islands.period) == (2, 0)
    with pytest.raises(ConfigError, match="islands.period"):
        load_config(None, ["islands.period=one epoch", *OWN])


class Others:
    """A plane to islands that answer with given messages."""

    def __init__(self, *others: bytes) -> None:
        self.others = others

    def gather(self, message: bytes, *, deadline_s: float) -> list[bytes]:
        return [*self.others, message]


INNER: Any = SimpleNamespace(is_first=True, broadcast_json=lambda value: value)


def test_tokenizers_are_compared_by_hash() -> None:
    one, two = (SimpleNamespace(to_str=lambda text=text: text) for text in ("one", "two"))
    other = Others()
    check_same_tokenizer(other, INNER, one)  # type: ignore[arg-type]
    sent = list[bytes]()
    other.gather = lambda message, deadline_s: sent.append(message) or [message]  # type: ignore
    check_same_tokenizer(other, INNER, one)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="data.tokenizer: .* on island 1, .* on island 0: .*try: copy"
    ):
        check_same_tokenizer(Others(sent[0]), INNER, two)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="data.tokenizer: none on island 1"):
        check_same_tokenizer(Others(sent[0]), INNER, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own", "kept", "said"),
    [
        ([5, "samples", None, "b"], [], "owner b has samples, owner a has tokens of a vocabulary of 9"),
        ([5, "tokens", 8, "b"], [], "owner b has tokens of a vocabulary of 8, owner a has tokens of"),
        ([5, "tokens", 9, "b"], [4, 6], "owner b has 5 samples, and had 6 at the checkpoint"),
        ([5, "tokens", 9, "b"], [4], "islands.count = 2: the checkpoint is of 1 owners"),
        ([0, "tokens", 9, "b"], [], "data.source: no owner has a sample"),
    ],
)  # fmt: skip
def test_owners_agree_before_the_first_round(own: list[Any], kept: list[int], said: str) -> None:
    samples = 0 if own[0] == 0 else 4
    first = json.dumps({"0": [samples, "tokens", 9, "a"]}).encode()
    source = SimpleNamespace(kind=own[1], vocabulary=own[2])
    owner: Any = SimpleNamespace(number=1, samples=own[0], source=source, name=own[3])
    joined: Any = SimpleNamespace(
        plane=Others(first), common=SimpleNamespace(held=kept), is_alone=False
    )
    with pytest.raises(ConfigError, match=said):
        agree_on_owners(joined, [owner])


def test_controls_are_undone_saved_and_loaded_with_the_weights() -> None:
    """A parameter may itself be called control."""
    policy = IslandsPolicy("scaffold", count=4, data="own")
    start = {"a": torch.ones(3), "a.control": torch.zeros(2)}
    method = find_method(policy)
    outer = method.open(start)
    before = outer.digest()
    mean = {name: torch.full_like(part, 0.5) for name, part in start.items()}
    mean |= {f"control:{name}": torch.full_like(part, 2.0) for name, part in start.items()}
    assert method.step(outer, mean, 2)
    assert outer.digest() != before
    outer.undo()
    assert outer.digest() == before
    assert method.step(outer, mean, 2)
    outer.commit()
    kept = outer.tensors()
    assert torch.equal(kept["a.control.scaffold_control"], torch.ones(2)), (
        "2 of 4 owners: half of 2"
    )
    assert torch.equal(kept["a"], torch.full((3,), 0.5))
    other = find_method(policy).open(start)
    other.load(kept)
    assert other.digest() == outer.digest()
    mean["control:a"][0] = torch.nan
    assert not method.step(outer, mean, 2)


def test_a_group_that_was_not_drawn_is_well_and_a_stopped_owner_is_not() -> None:
    rounds = OwnerRounds.__new__(OwnerRounds)
    asked = list[str]()
    rounds.run = SimpleNamespace(
        skips=SimpleNamespace(check_moved=lambda *words: asked.append(str(words))), step_count=1
    )  # type: ignore[assignment]
    rounds.common = SimpleNamespace(refusals=RefusalCounter(2))  # type: ignore[assignment]
    rounds.owners, rounds._steps, rounds.first_step = {1: SimpleNamespace(name="east")}, 0, 0  # type: ignore[dict-item]
    rounds.policy = IslandsPolicy("fedavg", count=2, data="own", refusals=2)
    rounds.states = SimpleNamespace(takes_turns=False)  # type: ignore[assignment]
    rounds.check_moved()
    assert not asked, "it made no step"
    rounds._steps = 1
    rounds.check_moved()
    assert asked
    for _ in range(2):
        rounds.common.refusals.count([1], [1])
    with pytest.raises(TrainingError, match="owner east: its change was refused 2 rounds in a row"):
        rounds.check_moved()
    rounds.states = SimpleNamespace(takes_turns=True)  # type: ignore[assignment]
    rounds.check_moved()


def test_a_round_whose_trimmed_mean_drops_nothing_says_so_once() -> None:
    """One of five owners was refused, so four changes are left."""
    rounds = OwnerRounds.__new__(OwnerRounds)
    rounds.policy = IslandsPolicy("fedavg", count=5, data="own", merge="trimmed").resolved()
    rounds._untrimmed = set()
    assert rounds.describe_untrimmed_round(0, 5) == []
    (line,) = rounds.describe_untrimmed_round(1, 4)
    assert line.startswith("round 1: islands.trim = 0.2: drops none of 4 changes at each end")
    assert rounds.describe_untrimmed_round(2, 4) == []
    rounds.policy = IslandsPolicy("fedavg", count=5, data="own").resolved()
    assert rounds.describe_untrimmed_round(3, 2) == []


def test_a_lost_island_is_named_by_its_owner() -> None:
    lost = IslandLost("islands: island 1: silent", (1,), 2.0)
    named = load_config(None, [FILES, *OWN, "data.owners=north,east"]).config
    assert str(name_lost_owners(lost, named)).endswith("island 1: silent; island 1 is owner east")
    assert name_lost_owners(lost, load_config(None, [FILES, *OWN]).config) is lost


SCAFFOLD = ("islands.data=own", "islands.method=scaffold", "islands.count=4", "optimizer.name=sgd")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((), ["the rate rises over the first 3 rounds (optimizer.warmup_steps: the default"]),
        (("optimizer.warmup_steps=11",), ["the first 3 rounds (optimizer.warmup_steps: 11 steps)"]),
        (("optimizer.warmup_steps=0",), []),
        (("train.steps=40",), []),  # four steps, of the first round alone
        (("islands.method=fedavg",), []),
        (("optimizer.name=adamw", "optimizer.warmup_steps=0"), ["the paper's inner optimizer is sgd"]),
    ],
)  # fmt: skip
def test_scaffold_warns_of_a_rate_that_rises_over_rounds(
    words: tuple[str, ...], wanted: list[str]
) -> None:
    asked = ["data.source=digits", "data.split=even", "islands.period=5", "train.steps=150"]
    config = load_config(None, [*asked, *SCAFFOLD, *words]).config
    schedule = OwnerSchedule((20, 20, 20, 20), 4, period=5)
    lines = _describe_choices(config, schedule)
    assert len(lines) == len(wanted)
    assert all(text in line for text, line in zip(wanted, lines, strict=True))


def test_the_worst_owner_of_text_is_that_with_the_most_bits_per_byte() -> None:
    """East's tokenizer has long tokens for east: its loss per token is larger, per byte smaller."""
    east = describe_text({"loss": 4.0, "targets": 100.0, "bytes_per_target": 5.0, "accuracy": 0.5})
    north = describe_text({"loss": 3.0, "targets": 300.0, "bytes_per_target": 1.5})
    assert east == {
        "loss": 4.0, "targets": 100.0, "accuracy": 0.5, "bytes": 500,
        "bits_per_byte": pytest.approx(4.0 / 5.0 / math.log(2)),
    }  # fmt: skip
    absent = describe_text({"loss": math.nan, "targets": 0.0, "bytes_per_target": math.nan})
    both = {"east": east, "north": north, "absent": absent}
    assert find_worst_owner(both) == "north"
    assert find_worst_owner({**both, "south": {"loss": 3.5, "targets": 9}}) == "east"
    assert find_worst_owner({"absent": absent}) == "absent"
    merged = merge_validations({"east": east, "north": north})
    assert merged["bytes"] == 950
    assert merged["bits_per_byte"] == pytest.approx((400 + 900) / 950 / math.log(2))
    assert "bytes" not in merge_validations({**both, "south": {"loss": 3.5, "targets": 9}})


def owner_states(owners: list[int], weight: Shard, size: int = 1) -> OwnerStates:
    """States of a group whose rank holds some boxes of one weight of 4 × 2."""
    states = OwnerStates.__new__(OwnerStates)
    local = SimpleNamespace(parameter=torch.zeros(weight.elements), shard=weight)
    states.run = SimpleNamespace(
        world=SimpleNamespace(size=size), program=SimpleNamespace(local={"w": local})
    )  # type: ignore[assignment]
    states.shards, states.kept, states._shapes = {"w": weight}, {one: {} for one in owners}, {}
    return states


def test_small_states_of_owners_are_stacked_and_come_back_on_any_rank() -> None:
    """Two tensors for each name, whatever the number of owners; a rank takes its own boxes."""
    whole = owner_states([1, 3, 5], Shard.whole("w", (8,), "float32"))
    for owner in (1, 5):
        whole.kept[owner] = {
            "optimizer.w.momentum": torch.arange(8.0) + 10 * owner,
            "optimizer.w.step": torch.tensor(float(owner)),
            "control.w": torch.arange(8.0) - owner,
        }
    whole.kept[3] = {"control.w": torch.arange(8.0) - 3}
    parts = whole.parts()
    assert len(parts) == 6
    assert parts["owners.control.w"][1].global_shape == (3, 8)
    stored: Any = SimpleNamespace(
        tensors={n: SimpleNamespace(shape=s.global_shape, dtype=s.dtype) for n, (_, s) in parts.items()}
    )  # fmt: skip
    boxes = (((0, 2),), ((5, 6),))
    for shard in (Shard.whole("w", (8,), "float32"), Shard("w", (8,), "float32", boxes)):
        rank = owner_states([1, 3], shard)
        read = {}
        for wanted in rank.list_wanted_shards(stored):
            tensor, _ = parts[wanted.name]
            cuts = [tensor[tuple(slice(*pair) for pair in box)] for box in wanted.slices]
            read[wanted.name] = torch.cat([cut.reshape(-1) for cut in cuts])
        rank.load(read)
        places = [k for ((start, stop),) in shard.slices for k in range(start, stop)]
        assert rank.kept[1]["optimizer.w.momentum"].tolist() == [10.0 + k for k in places]
        assert rank.kept[1]["optimizer.w.step"] == torch.tensor(1.0)
        assert rank.kept[3].keys() == {"control.w"}
        assert rank.kept[3]["control.w"].tolist() == [k - 3.0 for k in places]
    whole.run.world.size = 2  # type: ignore[misc]
    assert "owner.3.control.w" in whole.parts()


def test_states_that_differ_in_shape_or_are_large_are_saved_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = owner_states([1, 3], Shard.whole("w", (8,), "float32"))
    states.kept = {1: {"optimizer.w.a": torch.zeros(8)}, 3: {"optimizer.w.a": torch.zeros(4)}}
    assert states.parts().keys() == {"owner.1.optimizer.w.a", "owner.3.optimizer.w.a"}
    states.kept[3] = {"optimizer.w.a": torch.zeros(8)}
    assert states.parts().keys() == {"owners.optimizer.w.a", "owners_of.optimizer.w.a"}
    monkeypatch.setattr("shoal.trainer.islands.owner_states.STACKED_BYTES", 31)
    assert states.parts().keys() == {"owner.1.optimizer.w.a", "owner.3.optimizer.w.a"}


@pytest.mark.parametrize("merge", ["median", "trimmed"])
def test_a_robust_merge_of_unlike_deals_shows_what_it_costs(merge: str) -> None:
    """The figures are those of the proof."""
    asked = ["data.source=digits", "train.steps=50", "islands.count=5", *OWN]
    schedule = OwnerSchedule((20,) * 5, 4, period=5)

    def lines(*words: str) -> list[str]:
        config = load_config(None, [*asked, f"islands.merge={merge}", *words]).config
        return _describe_choices(config, schedule)

    results = Path(__file__).parents[2] / "proof" / "results" / "owners.json"
    unlike = json.loads(results.read_text())["figures"]["unlike"]

    def percent(merge: str, fault: str) -> str:
        return f"{unlike[f'dirichlet:0.1 {merge} {fault}']['accuracy'][0]:.0%}".replace("%", " %")

    (line,) = lines("data.split=labels:2")
    assert f"{percent(merge, 'none')} instead of {percent('mean', 'none')} with the mean" in line
    wrong = f"{percent(merge, 'permuted')} instead of {percent('mean', 'permuted')} with one wrong"
    assert wrong in line
    assert "\n" not in line
    assert lines("data.split=even") == []
