"""The screen of `shoal watch` as text, at several sizes, of runs in each state."""

from __future__ import annotations

import fcntl
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from watched_runs import BEGAN_S, make_run, write_event, write_ranks, write_steps

from shoal.view.run_table import RunRow
from shoal.view.watch.rank_table import sort_worst_first
from shoal.view.watch.run_watcher import IslandsWatcher, RunWatcher
from shoal.view.watch.styled_lines import cell_width, line_text
from shoal.view.watch.watch_loop import handle_key
from shoal.view.watch.watch_screen import (
    VIEWS,
    ScreenOptions,
    next_view,
    render_screen,
    render_snapshot,
)
from shoal.view.watch.watch_state import RankState, WatchedRun

NOW_S = BEGAN_S + 600
SIZES = [(80, 24), (120, 40), (200, 60)]
ROW = RunRow(
    "mine", "runs/mine", "running", "", 60, 200, 3.1157, None, 8192.0, "tokens", "ddp",
    BEGAN_S, NOW_S, alive=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    import time

    time.tzset()


def texts(
    run: WatchedRun, width: int = 80, height: int = 24, options: ScreenOptions | None = None
) -> list[str]:
    lines = render_screen(run, width, height, options or ScreenOptions(braille=False), NOW_S)
    return [line_text(line) for line in lines]


def read(folder: Path, state: str = "running", how: str = "") -> WatchedRun:
    """The state of a made folder, with a row that does not depend on this machine's processes."""
    found = IslandsWatcher(folder).read()
    islands = [replace(one, row=replace(one.row, state=state)) for one in found.islands]
    return replace(found, row=replace(ROW, state=state, how=how), islands=islands)


def test_eighty_columns_and_twenty_four_lines(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine", rank_3=0.04)
    write_event(folder, "validated", step=50, loss=3.5, unigram_entropy=6.0)
    write_event(folder, "slow_rank", rank=3, host="a", phase="data", extra_s=0.04, share=0.16)
    assert texts(read(folder)) == SCREEN.splitlines()


SCREEN = """\
mine · running · step 60/200 · 35 s left · loss 3.1157 · val 3.5000
######.............. 30%  ddp · 4 ranks · 8.2K tokens/s · 30.0% of matmul rate
started 11-18 11:06, 10 min 00 s ago
   6.877 *****
             *******
                   **********
   4.996                    **********
                                     ***************
                                                   ****************o*
   3.116                                                            ************
    step 1                                                                    60
rank  step      time     late   memory  by part, mean of recent steps
   0    60  245.0 ms   0.0 ms  1.0 GiB  ddffffffffffffffffffffffffsssuuuu.......
   1    60  245.0 ms   0.0 ms  1.0 GiB  ddffffffffffffffffffffffffsssuuuu.......
   2    60  245.0 ms   0.0 ms  1.0 GiB  ddffffffffffffffffffffffffsssuuuu.......
   3    60  245.0 ms  40.0 ms  1.0 GiB  ddddddddfffffffffffffffffffffffffsssuuuc
11:09:40 validation at step 50: loss 3.5000, unigram entropy 6.0000 (2.5000
         below it)
11:10:40 rank 3 on a is slow in data: 40.0 ms a step (16%) more than the others,
         who wait for it
foreseen → now  step 200.0 ms → 250.0 ms (1.25 ×)
rank 0 waits    communication 50.0 ms (20%), for rank 3: data  data 10.0 ms (4%)
d data  f forward and backward  s sum  u update  c callbacks  o other  . waiting
 q quit  tab next view  arrows scroll  l log axis  p pause  ? help
"""


def test_no_screen_is_larger_than_its_terminal(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "漢字", rank_1=0.1)
    write_event(folder, "notice", text="漢" * 500)
    run = RunWatcher(folder).read()
    sizes = [*SIZES, (20, 5), (1, 1), (40, 3)]
    for view, (width, height), more in itertools.product(VIEWS, sizes, (False, True)):
        options = ScreenOptions(view=view, help=more, log=more, braille=not more)
        lines = render_screen(run, width, height, options, NOW_S)
        assert len(lines) == height
        assert max(cell_width(line_text(line)) for line in lines) <= width, (view, width, height)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_every_size_has_all_parts(tmp_path: Path, width: int, height: int) -> None:
    run = read(make_run(tmp_path / "mine", rank_2=0.1))
    shown = "\n".join(texts(run, width, height))
    for part in ("running", "step 60/200", "loss 3.1157", "foreseen → now", "rank 0 waits",
                 "data: 3 files", "q quit", "35 s left"):  # fmt: skip
        assert part in shown
    assert (
        sum(line.lstrip().startswith(("0  ", "1  ", "2  ", "3  ")) for line in shown.splitlines())
        == 4
    )
    assert "late" in shown


def rank(number: int, late_s: float = 0.0, step: int = 9, note: str = "") -> RankState:
    return RankState(
        str(number), "a", "", "", step, (0.0, 0, 1.0, 0, 0, 0, 0, 0.2), late_s, 1 << 30, note
    )


def test_of_many_ranks_the_worst_come_first_under_a_line_about_all() -> None:
    ranks = [rank(k, late_s=k / 1000) for k in range(64)]
    ranks[7], ranks[9] = rank(7, note="hung"), rank(9, step=3)
    run = WatchedRun("mine", row=ROW, ranks=ranks)
    lines = texts(run, options=ScreenOptions(view="ranks", braille=False))
    head = next(k for k, line in enumerate(lines) if line.startswith("rank "))
    assert lines[head - 1].startswith("64 ranks at step 3–9 · 7 hung · time 1.2 s median")
    order = [line.split()[0] for line in lines[head + 1 :] if line and line.split()[0].isdecimal()]
    assert order[:4] == ["7", "9", "63", "62"]
    scrolled = texts(run, options=ScreenOptions(view="ranks", first=3, braille=False))
    assert scrolled[head + 1].split()[0] == "62"
    last = texts(run, options=ScreenOptions(view="ranks", first=999, braille=False))
    assert [line.split()[0] for line in last[head + 1 : -2]][-1] == "0"
    assert [one.name for one in sort_worst_first(ranks)][:2] == ["7", "9"]


@pytest.mark.parametrize(
    ("name", "fields", "state", "shown"),
    [
        ("worker_died", {"rank": 2, "pid": 5, "how": "killed by SIGKILL"}, "killed", "2  dead"),
        ("hang", {"rank": 1, "host": "a", "waited_s": 30, "phase": "sum"}, "hung", "1  hung"),
    ],
)
def test_a_rank_that_died_or_hangs_is_marked(
    tmp_path: Path, name: str, fields: dict[str, object], state: str, shown: str
) -> None:
    folder = make_run(tmp_path / "mine")
    write_event(folder, name, **fields)
    lines = texts(read(folder, state, "no end recorded"))
    assert lines[0].startswith(f"mine · {state} · step 60/200")
    assert any(line.lstrip().startswith(shown) for line in lines)
    assert "no end recorded" in lines[2]
    write_event(folder, "restarting", attempt=1, of=3)
    assert not any(shown in line for line in texts(read(folder)))


def test_a_run_that_has_no_step_yet_or_no_watchdog(tmp_path: Path) -> None:
    lines = texts(read(make_run(tmp_path / "mine", steps=0), "starting"))
    assert lines[0] == "mine · starting"
    assert any("no rank has made a step yet" in line for line in lines)
    assert any("data: 3 files" in line for line in lines)


def test_nobody_foretells_the_end_of_a_run_that_starts_again(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine")
    assert " left" in texts(read(folder))[0]
    for state in ("starting", "hung", "silent"):
        assert " left" not in texts(read(folder, state))[0]


def test_a_rank_that_stepped_after_its_death_is_not_dead(tmp_path: Path) -> None:
    """A loop of the user's own that is started again writes no event of it."""
    folder = make_run(tmp_path / "mine")
    write_event(folder, "worker_died", rank=2, how="killed by SIGTERM", time_s=BEGAN_S + 30)
    assert not any(line.startswith("   2  dead") for line in texts(read(folder)))
    write_event(folder, "worker_died", rank=2, how="killed by SIGTERM", time_s=BEGAN_S + 90)
    assert any(line.startswith("   2  dead") for line in texts(read(folder)))


def test_a_sample_of_code_takes_no_lines_for_its_blanks(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine")
    write_event(folder, "notice", text="a sample: def f(x):" + 100 * " " + "return x")
    assert any(line.endswith("a sample: def f(x): return x") for line in texts(read(folder)))


def test_islands_have_rows_and_their_ranks_the_name_of_their_island(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    write_event(tmp_path / "far", "run_started")
    for island in range(2):
        folder = make_run(tmp_path / "far" / f"island-{island}")
        write_event(
            folder, "round_committed", round=0, seconds=10.0, exposed_s=2.5, admitted=[0, 1]
        )
    lines = texts(read(tmp_path / "far"), height=40)
    assert any(
        line.startswith("island-1    running") and line.endswith("1    25%") for line in lines
    )
    names = [line.split()[0] for line in lines if "/" in line.split("  ")[0] and line[0] == " "]
    assert {"0/0", "1/3"} <= {name for line in lines for name in line.split()[:1]}, names
    assert any("island-0: data: 3 files" in line for line in lines)
    row = IslandsWatcher(tmp_path / "far").read().row
    assert row is not None
    assert row.rate == 2 * 8192.0, "of both islands"
    assert row.layout == "ddp"
    assert "2 islands, each ddp · 8 ranks" in lines[1]
    for island in range(2):
        write_event(tmp_path / "far" / f"island-{island}", "run_finished", how="completed")
    row = IslandsWatcher(tmp_path / "far").read().row
    assert row is not None
    assert (row.state, row.how, row.step) == ("ended", "completed", 60), "as all of them"
    assert row.path == str(tmp_path / "far")


def test_islands_that_all_died_under_a_launcher_that_lives_are_starting(tmp_path: Path) -> None:
    """Their own rows are read at once, the row of all of them more rarely."""
    make_run(tmp_path / "far")
    for island in range(2):
        write_event(make_run(tmp_path / "far" / f"island-{island}"), "worker_died", fatal=True)
    watcher = IslandsWatcher(tmp_path / "far")
    with (tmp_path / "far" / "owner.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        row = watcher.read().row
    assert row is not None
    assert (row.state, row.alive) == ("starting", True)


def test_servers_and_stages_have_roles(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine")
    for layout, role in (
        ('{"dp_shard": 4, "servers": 1}', "3  server"),
        ('{"pp": 2, "dp_replicate": 2}', "2  stage 1"),
    ):
        (folder / "plan.json").write_text(f'{{"layout": {layout}, "steps": 200}}')
        assert any(line.lstrip().startswith(role) for line in texts(read(folder)))


def test_hosts_and_devices_of_ranks_json(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine")
    (folder / "ranks.json").write_text(
        '{"ranks": [{"rank": 0, "host": "n1\\u001b[2J", "device": "cuda:0", "device_name": "H100"},'
        ' {"rank": "x"}, 3, {"rank": 1, "host": "n2"}]}'
    )
    old, new = ({"host": "n1\u001b[2J", "devices": [
        {"index": 0, "utilisation": share, "memory_used_bytes": 3 << 30, "power_w": None,
         "temperature_c": 61.0}, "x", {"index": "y"}]} for share in (0.5, 0.97))  # fmt: skip
    samples = [json.dumps(old), "[]", json.dumps(new), '{"devices": 3}', "torn"]
    (folder / "devices.jsonl").write_text("\n".join(samples))
    lines = texts(read(folder), 120, 40)
    assert any(
        line.split()[:8] == ["0", "n1·[2J", "H100", "97%", "3.0", "GiB", "61", "°C"]
        for line in lines
    )
    assert "n2" in "\n".join(texts(read(folder))), "hosts that differ are shown in 80 columns too"


def test_keys_change_the_view_the_axis_and_the_place() -> None:
    run = WatchedRun("mine", row=ROW, ranks=[rank(k) for k in range(9)])
    options = ScreenOptions()
    seen = [options := next_view(options) for _ in VIEWS]
    assert [one.view for one in seen] == ["curves", "ranks", "events", "all"]
    for key, field in (("l", "log"), ("p", "paused"), ("?", "help")):
        changed = handle_key(key, options, 24, run)
        assert changed is not None
        assert getattr(changed, field)
        assert handle_key(key, changed, 24, run) == options
    assert handle_key("down", options, 24, run) == replace(options, first=1)
    assert handle_key("up", options, 24, run) == options
    assert handle_key("page down", options, 24, run) == replace(options, first=8)
    assert handle_key("q", options, 24, run) is None
    assert handle_key("x", options, 24, run) == options
    assert "paused" in texts(run, options=ScreenOptions(paused=True))[-1]
    assert any("scroll ranks" in line for line in texts(run, options=ScreenOptions(help=True)))


def test_the_log_axis_and_ascii(tmp_path: Path) -> None:
    run = read(make_run(tmp_path / "mine"))
    plain = texts(run, options=ScreenOptions(view="curves", braille=False))
    curve = "".join(plain[3:-4])
    assert "*" in curve
    assert curve.isascii()
    logged = texts(run, options=ScreenOptions(view="curves", braille=False, log=True))
    assert any(line.lstrip().startswith("log 1") for line in logged)
    assert "".join(logged[3:-4]) != curve
    dots = texts(run, options=ScreenOptions(view="curves"))
    assert any("⠀" < letter <= "⣿" for line in dots for letter in line)


def test_a_snapshot_has_every_rank_and_no_keys(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine")
    write_ranks(folder, range(61, 62), {}, ranks=30)
    write_steps(folder, range(61, 62))
    run = read(folder)
    lines = [line_text(one) for one in render_snapshot(run, 80, ScreenOptions(), NOW_S)]
    assert sum(line.split()[1:2] == ["61"] for line in lines) == 30
    assert "q quit" not in "\n".join(lines)


def test_a_silent_run_says_since_when(tmp_path: Path) -> None:
    run = replace(
        read(make_run(tmp_path / "mine")), row=replace(ROW, state="silent", last_sign_s=NOW_S - 300)
    )
    assert texts(run)[2] == "try: shoal diagnose runs/mine · last sign of life 5 min 00 s ago"
    run = replace(run, row=replace(ROW, last_sign_s=NOW_S + 3600))
    assert texts(run)[2] == "its clock is 1 h 00 min ahead"


def test_a_death_is_not_pushed_out_by_the_notices_of_its_restart(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "mine")
    write_event(folder, "worker_died", rank=1, pid=7, how="ended by the watch", attempt=0)
    write_event(folder, "restarting", attempt=1, of=3, saved=None)
    for number in range(4):
        write_event(folder, "notice", rank=0, text=f"notice {number} " + "of many words " * 12)
    screen = "\n".join(texts(read(folder)))
    assert "rank 1 (pid 7): ended by the watch" in screen
    assert "notice 3" in screen
