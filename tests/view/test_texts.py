"""Events as sentences, and the block at the end of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shoal.base.runlog.events import EVENTS, EventLog, append_line
from shoal.base.text.event_sentences import SENTENCES, event_text
from shoal.view import summarise_run, summary


@pytest.mark.parametrize(
    ("event", "fields", "text"),
    [
        ("notice", {"text": "hello\n  there\n"}, "hello\n  there"),
        ("worker_died", {"rank": 1, "pid": 7, "how": "killed by SIGKILL"},
         "rank 1 (pid 7): killed by SIGKILL"),
        ("checkpoint_saved", {"folder": "runs/a/checkpoints/step-20", "bytes": 2**20,
                              "seconds": 0.5}, "checkpoint saved: step-20 (1.0 MiB, 500.0 ms)"),
        ("checkpoint_saved", {"step": 3}, "checkpoint saved: step-3"),
        ("checkpoint_failed", {"step": 20, "reason": "no space left on device"},
         "checkpoint at step 20 not saved: no space left on device"),
        ("checkpoint_damaged", {"file": "step-3/rank-0.safetensors", "tensor": "w [0:4]",
                                "reason": "does not match its hash"},
         "checkpoint damaged: step-3/rank-0.safetensors w [0:4]: does not match its hash"),
        ("resumed", {"folder": "/r/checkpoints/step-9", "step": 9, "differs": {"processes": 4}},
         "resumed from step-9; different from then:\n  processes = 4"),
        ("resumed", {"folder": "elsewhere", "step": 9, "differs": ["train.lr"]},
         "resumed from elsewhere at step 9; different from then:\n  train.lr"),
        ("step_skipped", {"rank": 1, "step": 4, "micro_batches": [3], "samples": [6, 7, 9]},
         "step 4 skipped, the weights did not move: non-finite numbers on rank 1, "
         "micro-batches 3, samples 6–7, 9"),
        ("step_skipped", {"step": 4, "samples": [1, 3, 5, 7, 9, 11, 13, 15]},
         "step 4 skipped, the weights did not move: non-finite numbers on samples "
         "1, 3, 5, 7, 9, 11 and 2 more"),
        ("step_skipped", {"step": 4, "reason": "the loss is not finite", "culprits": [
            {"rank": 1, "micro_batches": [3], "samples": [6, 7]}, {"rank": 2}]},
         "step 4 skipped, the weights did not move: the loss is not finite on rank 1, "
         "micro-batches 3, samples 6–7; rank 2"),
        ("notice", {"text": "a sample:", "body": "def f():\n    pass"},
         "a sample:\ndef f():\n    pass"),
        ("checkpoint_damaged", {"file": "f", "tensor": "", "reason": "cut short", "kept_as": "g"},
         "checkpoint damaged: f: cut short; kept as g"),
        ("stop_requested", {"signal": "SIGINT"},
         "Ctrl-C: saving, then stopping (Ctrl-C again stops at once, unsaved)"),
        ("stop_requested", {"signal": "SIGTERM", "rank": 2},
         "SIGTERM at rank 2: saving, then stopping (Ctrl-C again stops at once, unsaved)"),
        ("stop_requested", {"signal": "SIGTERM", "step_s": 72.0},
         "SIGTERM: saving after this step (they take 1 min 12 s), then stopping (Ctrl-C again stops "
         "at once, unsaved)"),
        ("stop_requested", {"signal": "SIGINT", "steps": False},
         "Ctrl-C: stopping, before the first step"),
        ("hang", {"rank": 1, "host": "a", "pid": 7, "phase": "step 3, data", "waited_s": 6.0,
                  "why": "it is in no collective (m.py:4)", "collective": "all_reduce of 8 B",
                  "ends_in_s": 60.0, "stacks": "runs/r/logs/hang-1.txt"},
         "no rank goes on for 6.0 s: rank 1 on a (pid 7), step 3, data: it is in no collective "
         "(m.py:4); the last collective: all_reduce of 8 B; if it does not go on, all start again "
         "in 1 min 00 s; stacks: runs/r/logs/hang-1.txt"),
        ("slow_rank", {"rank": 1, "host": "a", "phase": "data", "extra_s": 0.032, "share": 0.304},
         "rank 1 on a is slow in data: 32.0 ms a step (30%) more than the others, who wait for it"),
        ("restarting", {"attempt": 1, "of": 3, "saved": 40}, "restart 1 of 3, from step-40"),
        ("validated", {"step": 20, "loss": 4.5, "targets": 12345, "unigram_entropy": 6.0},
         "validation at step 20: loss 4.5000, unigram entropy 6.0000 (1.5000 below it), "
         "12.3K targets"),
        ("validated", {"loss": 6.5, "unigram_entropy": 6.0},
         "validation: loss 6.5000, unigram entropy 6.0000 (0.5000 above it)"),
        ("validated", {"loss": None, "targets": 0}, "validation: loss –, 0 targets"),
        ("validated", {"loss": 2.5, "bits_per_byte": 1.25, "worst": "east", "by_source": {
            "east": {"loss": 2.0, "bits_per_byte": 1.5}, "north": {}}},
         "validation: loss 2.5000, 1.2500 bits per byte; mean of 2 owners, worst east: 1.5000 bits "
         "per byte (loss 2.0000)"),
        ("validated", {"loss": 0.5, "worst": "6", "by_source": {
            "6": {"loss": 3.5249, "accuracy": 0.0, "targets": 1},
            "9": {"loss": 2.0, "accuracy": 0.5, "targets": 9},
            "39": {"loss": 1.3192, "accuracy": 7 / 11, "targets": 11}}},
         "validation: loss 0.5000; mean of 3 owners, worst 6: 3.5249, accuracy 0.0% of 1 targets; "
         "worst with 10 targets or more 39: 1.3192, accuracy 63.6% of 11 targets"),
    ],
)  # fmt: skip
def test_sentences(event: str, fields: dict[str, Any], text: str) -> None:
    assert event_text({"event": event, **fields}) == text


def test_every_sentence_is_of_a_known_event_and_survives_missing_fields() -> None:
    assert set(SENTENCES) <= set(EVENTS)
    for name in EVENTS:
        text = event_text({"event": name})
        assert (text is None) == (name not in SENTENCES)
    assert event_text({}) is None


def fake_run(folder: Path, *, steps: int = 4, **metrics: Any) -> EventLog:
    log = EventLog(folder / "events.jsonl", None)
    log.emit("run_started")
    (folder / "plan.json").write_text('{"unit": "tokens"}')
    for step in range(1, steps + 1):
        record = {"step": step, "loss": 5.0 - step / 10, "tokens": 1000,
                  "step_s": 9.0 if step == 1 else 0.1, "tokens_per_s": 10000.0, "mfu": 0.25,
                  "peak_memory_bytes": 3 * 2**20,
                  "peak_memory_bytes_by_rank": [2**20, 3 * 2**20], "comm_exposed_s": 0.01,
                  "comm_bytes": 2**20 + 512,
                  "comm_bytes_by_kind": {"all_reduce": 2**20, "all_gather": 512, "broadcast": 0},
                  "data_wait_s": 0.0}  # fmt: skip
        append_line(folder / "metrics.jsonl", {**record, **metrics})
    return log


def test_summary_of_a_finished_run(tmp_path: Path) -> None:
    log = fake_run(tmp_path)
    (tmp_path / "checkpoints" / "step-4").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-4" / "manifest.json").touch()
    log.emit("checkpoint_saved", step=4, bytes=5 * 2**20)
    log.emit("worker_died", rank=1, pid=9, how="killed by SIGKILL", traceback="", fatal=False)
    log.emit("restarting", attempt=1, of=3)
    log.emit("step_skipped", step=2, rank=1)
    log.emit("step_skipped", step=3, reason="loss 9 is 40 deviations above 2, the median of …")
    log.emit("validated", step=4, loss=4.5, targets=9, unigram_entropy=6.0, seconds=2.0)
    told = "10.0 GiB reserved, 9.0 GiB allocated, largest hole 1.0 GiB"
    log.emit("run_finished", how="finished", steps=4, allocator=told)
    lines = summarise_run(tmp_path).splitlines()
    assert lines[0] == "finished at step 4"
    assert lines[1] == "  trained      4 steps, 4.0K tokens in 9.3 s; last loss 4.6000"
    assert re.fullmatch(r"  took         [\d.]+ ms: 9.3 s steps, 2.0 s validation", lines[2])
    assert lines[3:] == [
        "  step         100.0 ms median, 10.0K tokens/s, MFU 25.0%",
        "  memory       3.0 MiB peak per rank (1.0 MiB, 3.0 MiB by rank)",
        f"  allocator    {told}",
        "  sent         1.0 MiB per step and rank (all_reduce 1.0 MiB, all_gather 512 B)",
        "  waited       per step 10.0 ms communication (0.4%), 0.0 ms data (0.0%)",
        "  restarts     1; last: rank 1 (pid 9): killed by SIGKILL",
        "  skipped      2, non-finite: 2, leapt out: 3",
        "  validation   loss 4.5000, unigram entropy 6.0000",
        "  checkpoints  step-4, 5.0 MiB each",
    ]
    assert max(map(len, lines)) <= 80


def test_what_rank_0_waits_for_is_said_where_a_rank_was_slow(tmp_path: Path) -> None:
    log = fake_run(tmp_path)
    for _ in range(2):
        log.emit("slow_rank", rank=1, host="a", phase="data", extra_s=0.01, share=0.3)
    waited = " ".join(
        summarise_run(tmp_path).partition("  waited")[2].split("  restarts")[0].split()
    )
    assert waited == (
        "per step 10.0 ms communication (0.4%), 0.0 ms data (0.0%); all wait for rank 1 (data)"
    )


def test_a_cpus_rate_is_not_called_mfu_and_noise_is_left_out(tmp_path: Path) -> None:
    fake_run(tmp_path, comm_bytes=0, comm_bytes_by_kind={}, samples=[0, 16])
    plan = {"steps": 4, "device": "cpu", "unit": "samples"}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    text = summarise_run(tmp_path)
    assert "4 steps, 64 samples in 9.3 s" in text
    assert "median, 160 samples/s, 25.0% of machine's matmul rate\n" in text
    assert "waited       per step 0.0 ms data (0.0%)" in text, "one process waits for nobody"
    assert "tokens" not in text
    assert "MFU" not in text
    (tmp_path / "small").mkdir()
    fake_run(tmp_path / "small", mfu=0.0004)
    assert "MFU" not in summarise_run(tmp_path / "small")


def test_a_narrow_terminal_breaks_lines_at_words(tmp_path: Path) -> None:
    fake_run(tmp_path).emit("worker_died", rank=1, pid=9, how="exit code 1", fatal=True,
                            traceback="ValueError: " + "boom " * 40)  # fmt: skip
    wide, narrow = summarise_run(tmp_path), summarise_run(tmp_path, 60)
    assert max(map(len, narrow.splitlines())) <= 60
    assert narrow.split() == wide.split(), "nothing is lost, no word is cut"


def test_summary_of_a_resumed_run_counts_its_own_steps(tmp_path: Path) -> None:
    fake_run(tmp_path, steps=3).emit("stop_requested", signal="SIGTERM")
    log = EventLog(tmp_path / "events.jsonl", None)
    log.emit("run_started")
    log.emit("resumed", rank=0, step=3, folder="checkpoints/step-3")
    append_line(tmp_path / "metrics.jsonl", {"step": 4, "loss": 1.0, "tokens": 500})
    log.emit("run_finished", how="finished", steps=4)
    text = summarise_run(tmp_path)
    assert text.startswith("finished at step 4\n")
    assert "1 step, 500 tokens" in text


def test_summary_of_runs_that_did_not_finish(tmp_path: Path) -> None:
    assert summarise_run(tmp_path) == "no end recorded; last seen before the first step"
    log = fake_run(tmp_path, mfu=None, peak_memory_bytes=None, peak_memory_bytes_by_rank=None)
    assert summarise_run(tmp_path).splitlines()[0] == "no end recorded; last seen at step 4"
    assert "MFU" not in summarise_run(tmp_path)
    assert "memory" not in summarise_run(tmp_path)
    log.emit("stop_requested", signal="SIGINT")
    head = summarise_run(tmp_path).splitlines()[0]
    assert head == "stopped at step 4, by Ctrl-C; nothing was saved"
    log.emit("run_finished", how="stopped on request; the last save failed")
    head = summarise_run(tmp_path).splitlines()[0]
    assert head == "stopped on request at step 4, by Ctrl-C; the last save failed"
    log.emit("worker_died", rank=1, pid=9, how="exit code 1", fatal=True,
             traceback="Traceback:\nValueError: boom")  # fmt: skip
    head = summarise_run(tmp_path).splitlines()[0]
    assert head == "failed at step 4: rank 1 (pid 9): exit code 1: ValueError: boom"


@pytest.mark.parametrize(
    ("losses", "line"),
    [
        ({10: 4.5}, "loss 4.5000"),
        ({0: 6.2, 10: 4.5}, "loss 4.5000 (6.2000 before training)"),
        ({10: 4.5, 20: 4.2}, "loss 4.2000"),
        ({10: 4.2, 20: 4.5}, "loss 4.5000; best 4.2000 at step 10"),
        (
            {0: 6.2, 10: 4.2, 20: 4.5},
            "loss 4.5000 (6.2000 before training); best 4.2000 at step 10",
        ),
        ({10: None, 20: 4.5}, "loss 4.5000"),
        ({10: 4.5, 20: None}, "loss –"),
    ],
)
def test_validation_beside_its_first_and_its_best(losses: dict[int, Any], line: str) -> None:
    found = [{"event": "validated", "step": step, "loss": loss} for step, loss in losses.items()]
    assert summary._validation(found) == line
