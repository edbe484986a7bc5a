"""Bugs that other projects shipped, planted on purpose: the battery must refuse and name each one."""

from __future__ import annotations

import pytest

from shoal.view.proof_lines import proof_text, verdict_line

# bug, case, size, name of the cause, words that its line must have
PLANTED = [
    ("mean of means", "mlp", 2, "mean of means", "the ranks weigh"),
    pytest.param(
        "mean of means",
        "llama",
        4,
        "mean of means",
        "not the mean over targets",
        marks=pytest.mark.proof,
    ),
    ("factor lost", "mlp", 4, "factor of ranks", "a factor 4 is lost"),
    ("short window", "mlp", 2, "last short window", "an epoch's short last step"),
    ("tie twice", "gpt", 2, "tie counted twice", "it is tied to head.weight"),
    ("local norm", "mlp", 2, "norm of a local shard", "their squares add up to the true norm's"),
    pytest.param(
        "norm of a half",
        "mlp",
        2,
        "norm of a local shard",
        "gradients before clipping are equal",
        marks=pytest.mark.proof,
    ),
    ("frozen updated", "mlp", 2, "frozen parameter moved", "frozen."),
    ("optimizer first", "mlp", 2, "optimizer over other tensors", "built before the weights"),
    ("batch norm drift", "cnn", 2, "BatchNorm drift", "running_mean"),
    pytest.param(
        "one rank skips",
        "mlp",
        4,
        "decision on one rank",
        "step 2 was skipped by rank 3 of 4 only",
        marks=pytest.mark.proof,
    ),  # in fp16 below
    ("dropped from bucket", "gpt", 2, "missing reduction", "part of the last bucket"),
]


@pytest.mark.parametrize(("bug", "case", "size", "cause", "words"), PLANTED)
def test_a_planted_bug_is_named(planted, bug, case, size, cause, words) -> None:
    (report, *others) = planted(size, "planted:prove", bug=bug, case=case)
    assert all(o["verdict"] == "different" for o in [report, *others]), verdict_line(report)
    told = report["cause"]
    assert told["name"] == cause, told["text"]
    assert words in told["text"]
    assert told["text"] in proof_text(report)


def test_a_stale_shard_is_named(planted) -> None:
    report = planted(2, "planted:prove", bug="stale shard", case="mlp", layout="zero1")[0]
    assert report["cause"]["name"] == "stale shard", report["cause"]["text"]


def test_sync_on_every_micro_batch_is_named(worlds) -> None:
    """Two steps: in an epoch's short last one, ranks that sync unequally often would hang."""
    report = worlds(2).call("planted:prove", bug="sync each", case="mlp", steps=2)[0]
    assert report["cause"]["name"] == "sync on every micro-batch", report["cause"]["text"]
    assert "32 : 16 : 8 : 4 : 2 : 1" in report["cause"]["text"]


def test_sums_kept_in_bf16_are_named(worlds) -> None:
    """In its own precision, against one process of that precision."""
    asked = {"case": "llama", "precision": "bf16"}
    report = worlds(2).call("planted:prove", bug="bf16 sums", **asked)[0]
    assert report["precision"] == "bf16"
    assert report["cause"]["name"] == "bf16 accumulation", report["cause"]["text"]
    assert worlds(2).call("planted:prove", bug="nothing", **asked)[0]["verdict"] == "equal"


def test_a_scaler_that_decides_alone_is_named(worlds) -> None:
    """fp16's own loss scale: one rank sees an overflow, skips and halves its scale by itself."""
    asked = {"case": "mlp", "precision": "fp16"}
    report = worlds(4).call("planted:prove", bug="one rank skips", **asked)[0]
    assert report["precision"] == "fp16"
    assert report["cause"]["name"] == "decision on one rank", report["cause"]["text"]
    assert "was skipped by rank 3 of 4 only" in report["cause"]["text"]
    assert worlds(4).call("planted:prove", bug="nothing", **asked)[0]["verdict"] == "equal"
