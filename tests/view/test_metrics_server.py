"""`shoal serve`: the page of metrics, and a server that hostile clients cannot break."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_requests import check, draw, send
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from shoal.base.runlog.log_tails import EventCounts
from shoal.base.runlog.rank_records import RankStep, encode_header
from shoal.cli import serve
from shoal.cli.main import app
from shoal.view.metrics_server import http_server, run_metrics
from shoal.view.metrics_server.http_server import MetricsServer, PageCache
from shoal.view.metrics_server.run_metrics import STATES, RunMetrics

LONGEST = 200 + len("~") + 12
"""Characters of a label, and of the digest that makes it unique."""
Sample = tuple[str, tuple[tuple[str, str], ...]]


def read_page(text: str) -> dict[Sample, float]:
    """Samples by name and labels, as Prometheus' own parser reads them; each once, with HELP and TYPE."""
    found: dict[Sample, float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type in ("gauge", "counter")
        for one in family.samples:
            key = (one.name, tuple(sorted(one.labels.items())))
            assert key not in found, f"{key}: a scraper refuses a page that has it twice"
            assert re.fullmatch(r"shoal_[a-z_]+", one.name)
            assert one.name.endswith("_total") == (family.type == "counter")
            found[key] = one.value
    return found


def of_run(samples: dict[Sample, float], run: str) -> dict[str, float]:
    """One run's samples by name, with the value of `stat` or `state` after a dot."""
    found = {}
    for (name, labels), value in samples.items():
        own = dict(labels)
        if own.pop("run", None) == run:
            more = own.get("stat") or own.get("state") or ""
            found[f"{name}.{more}" if more else name] = value
    return found


def make_run(folder: Path, *, steps: int = 3, ranks: int = 0, events: tuple[str, ...] = ()) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(
        json.dumps({"layout": {"dp_replicate": 2}, "steps": 10, "unit": "tokens"})
    )
    rows = [
        {"step": k, "loss": 5.0 - k, "lr": 0.5, "tokens": 100, "step_s": 0.5, "data_wait_s": 0.125}
        for k in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = ("run_started", *events)
    (folder / "events.jsonl").write_text(
        "".join(json.dumps({"event": name, "time_s": 1e9}) + "\n" for name in names)
    )
    if ranks:
        (folder / "rank_steps").mkdir()
        records = [
            # rank 1 is late by 0.25 s, so the others wait for it
            RankStep(k, rank, 1, 0.0, 1000 + rank, (0.0, 0.25 if rank == 1 else 0.0, 0.5, *(0.0,) * 4, 0.0 if rank == 1 else 0.25))
            for k in range(1, 31 if ranks < 100 else 4) for rank in range(ranks)
        ]  # fmt: skip
        (folder / "rank_steps/node-0.bin").write_bytes(
            encode_header(0) + b"".join(one.encode() for one in records)
        )
    return folder


def test_a_run_is_a_series_per_metric(tmp_path: Path) -> None:
    make_run(
        tmp_path / "a", ranks=4, events=("step_skipped", "step_skipped", "restarting", "notice")
    )
    device = {
        "utilisation": 0.5,
        "memory_used_bytes": 7,
        "memory_total_bytes": 9,
        "power_w": None,
        "temperature_c": 40,
    }
    lines = [
        {"time_s": 1.0, "host": "gone", "devices": [{"utilisation": 0.01}]},
        {"time_s": 100.0, "host": "x", "devices": [device | {"utilisation": 0.02}]},
        {"time_s": 110.0, "host": "x", "devices": [device, device | {"utilisation": 1.0}]},
    ]
    (tmp_path / "a/devices.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"torn'
    )
    make_run(tmp_path / "b", steps=0)
    samples = read_page(RunMetrics(tmp_path).format_page())
    found = of_run(samples, "a")
    assert sum(value for name, value in found.items() if "_state." in name) == 1
    assert {name.partition(".")[2] for name in found if "_state." in name} == set(STATES)
    expected = {
        "shoal_run_step": 3, "shoal_run_steps": 10, "shoal_run_loss": 2.0, "shoal_run_tokens_per_second": 200,
        "shoal_run_learning_rate": 0.5, "shoal_run_step_seconds": 0.5, "shoal_run_data_wait_seconds": 0.125,
        "shoal_run_ranks": 4, "shoal_rank_wait_seconds.min": 0, "shoal_rank_wait_seconds.max": 0.25,
        "shoal_rank_busy_seconds.min": 0.5, "shoal_rank_busy_seconds.max": 0.75,
        "shoal_rank_peak_memory_bytes.max": 1003, "shoal_run_worst_rank": 1,
        "shoal_run_worst_rank_lateness_seconds": 0.25, "shoal_run_devices": 2,
        "shoal_device_utilisation_ratio.min": 0.5, "shoal_device_utilisation_ratio.max": 1.0,
        "shoal_device_temperature_celsius.max": 40, "shoal_run_skipped_steps_total": 2,
        "shoal_run_restarts_total": 1, "shoal_run_starts_total": 1, "shoal_run_hangs_total": 0,
    }  # fmt: skip
    assert {name: found.get(name) for name in expected} == expected
    assert not any("power" in name for name in found)
    assert "shoal_run_loss" not in of_run(samples, "b")
    assert samples["shoal_run_info", (("layout", "ddp"), ("run", "a"), ("unit", "tokens"))] == 1


def test_a_page_has_no_series_of_a_rank(tmp_path: Path) -> None:
    few = read_page(RunMetrics(make_run(tmp_path / "few", ranks=2)).format_page())
    many = read_page(RunMetrics(make_run(tmp_path / "many", ranks=1024)).format_page())
    assert len(few) == len(many)
    assert of_run(many, "many")["shoal_run_ranks"] == 1024


def test_runs_come_and_go(tmp_path: Path) -> None:
    metrics = RunMetrics(tmp_path)
    assert of_run(read_page(metrics.format_page()), "a") == {}
    run = make_run(tmp_path / "a", events=("spike",))
    assert of_run(read_page(metrics.format_page()), "a")["shoal_run_spikes_total"] == 1
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "spike"}\n{"event": "spi')
    assert of_run(read_page(metrics.format_page()), "a")["shoal_run_spikes_total"] == 2
    with (run / "events.jsonl").open("a") as file:
        file.write('ke"}\n')
    assert of_run(read_page(metrics.format_page()), "a")["shoal_run_spikes_total"] == 3
    (run / "events.jsonl").unlink()
    make_run(tmp_path / "a", events=("spike",))
    assert of_run(read_page(metrics.format_page()), "a")["shoal_run_spikes_total"] == 1
    (tmp_path / "new").write_text('{"event": "notice"}\n' * 50 + '{"event": "spike"}\n' * 4)
    os.replace(tmp_path / "new", run / "events.jsonl")
    assert of_run(read_page(metrics.format_page()), "a")["shoal_run_spikes_total"] == 4
    (run / "events.jsonl").write_text("")
    assert of_run(read_page(metrics.format_page()), "a")["shoal_run_spikes_total"] == 0
    for path in sorted(run.rglob("*"), reverse=True):
        path.unlink()
    run.rmdir()
    assert of_run(read_page(metrics.format_page()), "a") == {}


def test_events_are_counted_in_parts_of_a_bounded_size(tmp_path: Path) -> None:
    """A year of events costs several pages; a line without an end is no reason to wait for one."""
    line, path = b'{"event": "spike"}\n', tmp_path / "events.jsonl"
    path.write_bytes(line * 5 + b"x" * 200 + b"\n" + line)
    events = EventCounts(path, ["spike"])
    whole = [events.update(50) for _ in range(12)]
    assert whole.index(True) > 4
    assert events.counts == {"spike": 6}


def hostile_runs(folder: Path) -> None:
    """Names and contents that break a page or a terminal if one of them is not escaped."""
    names = [
        'a"} 1\nshoal_run_loss{run="x', "a\\", "a\\n", "line\nbreak", "\x1b]0;title\x07", "a\x01", "a\x02", "é✓", "\u202e" "abc",
        "x" * 255, "y" * 230 + "1", "y" * 230 + "2", "<script>", "{run=\"a\"}", "# HELP x", " ", "run\t1", "\udcff\udcfe",
    ]  # fmt: skip
    for name in names:
        make_run(folder / name)
    bad = make_run(folder / "bad", ranks=2)
    values = [
        '"a"',
        "NaN",
        "Infinity",
        "1e999",
        "-1e400",
        "true",
        "[]",
        "{}",
        "null",
        "1" * 400,
        '"\\u0000"',
    ]
    keys = (
        "loss",
        "lr",
        "step_s",
        "mfu",
        "grad_norm",
        "tokens",
        "peak_memory_bytes",
        "data_wait_s",
    )
    with (bad / "metrics.jsonl").open("a") as file:
        for value in values:
            file.write(
                "{" + ", ".join([f'"{key}": {value}' for key in keys] + ['"step": 4']) + "}\n"
            )
            file.write(f'{{"step": {value}}}\n')
    with (bad / "events.jsonl").open("a") as file:
        for value in values:
            file.write(
                f'{{"event": {value}}}\n{{"event": "validated", "loss": {value}, "time_s": {value}}}\n'
            )
    with (bad / "devices.jsonl").open("w") as file:
        for value in values:
            file.write(f'{{"time_s": {value}, "host": {value}, "devices": {value}}}\n')
            file.write(
                f'{{"time_s": 5, "host": {value}, "devices": [{value}, {{"utilisation": {value}}}]}}\n'
            )
    nan = RankStep(2**63, 2**32 - 1, 1, float("nan"), 2**63, (float("nan"),) * 8)
    with (bad / "rank_steps/node-0.bin").open("ab") as file:
        file.write(nan.encode() + b"torn")
    (bad / "rank_steps/node-1.bin").write_bytes(os.urandom(1000))
    (bad / "rank_steps/node-2.bin").mkdir()
    (bad / "plan.json").write_text('{"steps": "many", "layout": [1], "unit": "</a>\\n"}')
    pipes = make_run(folder / "pipes")
    for name in ("devices.jsonl", "rank_steps/node-0.bin"):
        (pipes / name).parent.mkdir(exist_ok=True)
        os.mkfifo(pipes / name)


def test_hostile_folders_make_a_page_that_prometheus_reads(tmp_path: Path) -> None:
    hostile_runs(tmp_path / "runs")
    text = RunMetrics(tmp_path / "runs").format_page()
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    samples = read_page(text)
    runs = {dict(labels)["run"] for name, labels in samples if name == "shoal_run_step"}
    assert len(runs) == 20
    assert {'a"} 1·shoal_run_loss{run="x', "a\\", "a\\n", "é✓", "<script>", "bad", "pipes"} <= runs
    assert all(len(run) <= LONGEST for run in runs)
    assert {one[: len("a·~")] for one in runs if one.startswith("a·")} == {"a·~"}
    assert len([one for one in runs if one.startswith("yyy")]) == 2


def test_a_page_has_a_bounded_number_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_metrics, "MOST_RUNS", 3)
    for k in range(5):
        (tmp_path / f"r{k}").mkdir()
        (tmp_path / f"r{k}/events.jsonl").write_text('{"event": "run_started"}\n')
    metrics = RunMetrics(tmp_path)
    samples = read_page(metrics.format_page())
    assert sum(name == "shoal_run_info" for name, _ in samples) == 3
    assert sum(value for (name, _), value in samples.items() if name == "shoal_runs") == 5


class Opened:
    """Paths that threads of a server opened, by an audit hook, which stays for the process's life."""

    paths: list[str] | None = None

    @classmethod
    def audit(cls, event: str, words: tuple[Any, ...]) -> None:
        if event not in ("open", "os.listdir", "os.scandir") or cls.paths is None:
            return
        by_server = threading.current_thread() is not threading.main_thread()
        if by_server and isinstance(words[0], str | bytes | os.PathLike):  # or one opened before
            cls.paths.append(os.fsdecode(words[0]))


class Served:
    """A server of a folder in this process."""

    def __init__(self, folder: Path, token: str | None = None, page: Any = None) -> None:
        self.warnings: list[str] = []
        make = page or RunMetrics(folder).format_page
        self.server = MetricsServer(("127.0.0.1", 0), make, token, self.warnings.append)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    def ask(
        self, path: str = "/metrics", *headers: str, method: str = "GET", host: str = "localhost"
    ) -> tuple[int, bytes]:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *headers, "", ""]
        head, _, body = send(self.port, "\r\n".join(lines).encode()).partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), body

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Any]:
    made: list[Served] = []

    def make(**options: Any) -> Served:
        made.append(Served(tmp_path / "runs", **options))
        return made[-1]

    make_run(tmp_path / "runs/a")
    yield make
    for one in made:
        one.close()


def test_three_paths_and_two_methods(served: Any) -> None:
    one = served()
    status, body = one.ask()
    assert status == 200
    assert of_run(read_page(body.decode()), "a")["shoal_run_loss"] == 2.0
    assert one.ask(method="HEAD") == (200, b"")
    assert one.ask("/metrics?x=1")[0] == 200
    assert one.ask("/healthz") == (200, b"ok\n")
    assert b'href="metrics"' in one.ask("/")[1]
    assert [one.ask(path)[0] for path in ("/metrics/", "/x", "/../secret", "metrics", "*")] == [
        404
    ] * 5
    assert [one.ask(method=word)[0] for word in ("POST", "PUT", "TRACE", "OPTIONS", "X")] == [
        405
    ] * 5
    assert one.warnings == []


def test_a_token_opens_the_metrics(served: Any) -> None:
    one = served(token="s3cret")
    assert one.ask()[0] == 401
    wrong = (
        "Bearer s3cre",
        "Bearer s3crets",
        "Bearer",
        "Basic s3cret",
        "s3cret",
        "Bearer \xff",
        "",
    )
    assert [one.ask("/metrics", f"Authorization: {word}")[0] for word in wrong] == [401] * len(
        wrong
    )
    assert [one.ask(path)[0] for path in ("/", "/x")] == [401, 401]
    assert one.ask("/healthz") == (200, b"ok\n")
    assert one.ask("/metrics", "Authorization: bearer s3cret", host="any.example")[0] == 200


def test_a_web_page_cannot_read_the_metrics_by_a_name_of_its_own(served: Any) -> None:
    one = served()
    hosts = (
        "localhost:1",
        "127.0.0.1",
        "[::1]:9",
        "evil.example",
        "127.0.0.1.evil.example",
        "",
        "0.0.0.0",
    )
    assert [one.ask(host=host)[0] for host in hosts] == [200, 200, 200, 403, 403, 403, 403]


def test_hostile_requests_get_no_file_and_no_traceback(
    served: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`make proof PART=serve` sends 10,000."""
    secret = b"secret-5f1e"
    (tmp_path / "secret").write_bytes(secret)
    one, rng = served(), random.Random(44)
    one.ask()
    Opened.paths = opened = []
    sys.addaudithook(Opened.audit)
    statuses: Counter[int] = Counter()
    for k in range(300):
        request = draw(rng)
        statuses[check(request, send(one.port, request, hang_up=k % 20 == 19), secret)] += 1
        one.server.cache._fresh_until_s *= k % 50 != 0  # some requests make the page anew
    Opened.paths = None
    assert {200, 400, 403, 404, 405, 505, 0} <= set(statuses)
    assert one.ask()[0] == 200
    assert one.warnings == []
    assert capfd.readouterr() == ("", "")
    runs = str(tmp_path / "runs")
    assert [path for path in opened if not path.startswith(runs) and path != "/proc/locks"] == []
    assert any(path.startswith(runs) for path in opened), "the hook saw the page being made"


def open_request(port: int) -> socket.socket:
    """A client that has not said all."""
    connection = socket.create_connection(("127.0.0.1", port), 60)
    connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: ")
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closed a connection, asked without waiting."""
    connection.setblocking(False)
    try:
        return connection.recv(10) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def wait_until(true: Callable[[], bool]) -> None:
    """Ask every 10 ms, for a minute."""
    for _ in range(6000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("not within a minute")


def test_connections_are_few(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "DEADLINE_S", 600.0)
    monkeypatch.setattr(http_server, "MOST_CONNECTIONS", 2)
    one = served()
    slow = [open_request(one.port) for _ in range(2)]
    wait_until(lambda: one.server._slots._value == 0)
    busy = send(one.port, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert busy in (http_server.BUSY, b""), "b'': the connection was reset before it was read"
    for connection in slow:
        connection.close()
    wait_until(lambda: one.server._slots._value == 2)
    assert one.ask()[0] == 200
    assert one.warnings == []


def test_a_slow_client_ends_at_the_deadline(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that sends a byte whenever the server might lose patience."""
    one = served()
    monkeypatch.setattr(http_server, "DEADLINE_S", 0.3)
    silent, slow = open_request(one.port), open_request(one.port)

    def closes() -> bool:
        with contextlib.suppress(ConnectionError):
            slow.setblocking(False)
            slow.sendall(b"a")
        return is_closed(slow)

    wait_until(closes)
    wait_until(lambda: is_closed(silent))
    monkeypatch.setattr(http_server, "DEADLINE_S", 600.0)
    assert one.ask()[0] == 200
    assert one.warnings == []


def test_a_head_has_at_most_8_kib(served: Any) -> None:
    one = served()
    head = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: "
    assert send(one.port, head + b"a" * 7000 + b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    assert send(one.port, head + b"a" * 9000 + b"\r\n\r\n") == b""
    assert send(one.port, head + b"a\r\nX: " * 200 + b"\r\n\r\n").startswith(b"HTTP/1.1 431 ")


def test_a_page_that_cannot_be_made_is_one_line(served: Any) -> None:
    def fail() -> str:
        raise ValueError("of a folder")

    one = served(page=fail)
    assert one.ask() == (500, b"the page was not made\n")
    assert one.warnings == ["the page was not made: ValueError: of a folder"]
    assert one.ask("/healthz")[0] == 200


def test_scrapers_cannot_have_the_page_made_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, cost_s, made = [0.0], [0.0], []

    def make() -> str:
        made.append(now_s[0])
        now_s[0] += cost_s[0]
        return "page"

    monkeypatch.setattr(http_server.time, "monotonic", lambda: now_s[0])
    for cost_s[0], end_s, most in ((0.001, 10.0, 10), (2.0, 100.0, 5)):
        now_s[0], cache = 0.0, PageCache(make)
        made.clear()
        while now_s[0] < end_s:
            assert cache.read() == b"page"
            now_s[0] += 0.01
        assert 0 < len(made) <= most


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("--host", "0.0.0.0"),
            "other machines could read the metrics without a token; try: --token-file FILE",
        ),
        (("--token-file", "EMPTY"), "a token is one word of ASCII letters; try: openssl rand"),
        (("--token-file", "NONE"), "No such file or directory; try: openssl rand -hex 32 > FILE"),
        (("--port", "USED"), "Address already in use; try: --port 0"),
        (("--host", "192.0.2.1", "--token-file", "GOOD"), "; try: --port 0, a free one"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    words: tuple[str, ...], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_TOKEN", raising=False)
    (tmp_path / "EMPTY").write_text("\n")
    (tmp_path / "GOOD").write_text("t0ken\n")
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        mine = [str(tmp_path / one) if one in ("EMPTY", "NONE", "GOOD") else one for one in words]
        mine = [str(used.getsockname()[1]) if one == "USED" else one for one in mine]
        done = CliRunner().invoke(app, ["serve", str(tmp_path), *mine])
    assert type(done.exception).__name__ == "ConfigError"
    assert line in str(done.exception)
    assert "\n" not in str(done.exception)


def test_a_folder_that_is_none_is_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["serve", str(tmp_path / "none")])
    assert "none: does not exist; try: " in str(done.exception)


def test_the_token_comes_from_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TOKEN", "of-env")
    (tmp_path / "t").write_text("of-file\n")
    assert serve._read_token(None) == "of-env"
    assert serve._read_token(tmp_path / "t") == "of-file"


def test_a_file_for_the_textfile_collector(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/a")
    done = CliRunner().invoke(
        app, ["serve", str(tmp_path / "runs"), "--write", str(tmp_path / "shoal.prom")]
    )
    assert done.exit_code == 0
    assert of_run(read_page((tmp_path / "shoal.prom").read_text()), "a")["shoal_run_step"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "shoal.prom"]


def test_ctrl_c_ends_it_in_a_line(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    words = [sys.executable, "-m", "shoal", "serve", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        port = int(re.match(r"http://127\.0\.0\.1:(\d+)/metrics: ", first)[1])  # type: ignore[index]
        answer = send(port, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n" in answer
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (0, "ended\n", "")
