"""Islands on one machine: one supervised run per island, started, watched and ended together.

    runs/NAME/run.toml             the request
    runs/NAME/island-K/            an ordinary run folder: metrics, events, logs, checkpoints
    python -m shoal.cli.workers.island_supervisor FOLDER …    supervises one island's workers

The workers of all islands are forked from one process with their imports (launch/fork_server.py),
which each supervisor reaches by the open file CHANNEL.

Islands on several machines are started one by one, with islands.at and islands.index; only the
address differs. The members of a run are fixed. When one island is lost, the others save and stop,
and all restart from the newest round that every island holds. No island outlives the launcher: the
kernel ends each island's supervisor with it, and so its workers; on systems without a parent-death
signal the guardian does.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import typer

from shoal.base.errors import UNSAVED_CODE, ClusterError, ConfigError
from shoal.base.plans.plan import Plan
from shoal.base.runlog.atomic_files import write_atomically
from shoal.base.runlog.damaged_lines import parse_event, read_object
from shoal.base.runlog.events import EventLog
from shoal.checkpoint.format.folders import make_temporary_path
from shoal.checkpoint.format.lease import RunLease
from shoal.checkpoint.format.listing import list_checkpoints
from shoal.cli.workers.island_supervisor import REFUSED, count_steps_to_save
from shoal.cli.workers.worker import worker_imports
from shoal.config.load import LoadedConfig, load_config
from shoal.config.owners import list_owner_names
from shoal.config.resolve import collect_layout_keys
from shoal.config.save import MICRO_BATCH, to_toml, write_derived
from shoal.launch import RunOutcome
from shoal.launch.processes import (
    Guardian,
    SharedForkServer,
    free_port,
    is_free_port,
    make_parent_death_hook,
    make_shared_environment,
)
from shoal.launch.stop_grace import StopGrace
from shoal.launch.stop_requests import ASKED, StopSignals
from shoal.launch.supervisor import MetricsProgress
from shoal.planning.recorded_plan import restore_choice
from shoal.planning.settle import settle_batch
from shoal.view.live import LiveView
from shoal.wire.member_keys import open_member_keys
from shoal.wire.run_token import TOKEN, new_token, read_token

LOOK_S = 0.1
GRACE_S = 30.0
"""Seconds allowed beyond the grace of the islands' own supervisors."""
STOPPED = (0, 143, 130, 138, 129)
"""Exit codes of an island that completed, or that stopped as asked."""
USER_MUST_ACT = (2, 3, UNSAVED_CODE)
"""Exit codes after which a restart would end the same way."""
SUPERVISOR = "shoal.cli.workers.island_supervisor"
"""Module of an island's supervisor: it imports half of what this one does."""


def island_folder(folder: Path, index: int) -> Path:
    """Return the folder of one island.

    >>> island_folder(Path("runs/far"), 2).as_posix()
    'runs/far/island-2'
    """
    return folder / f"island-{index}"


def island_folders(folder: Path) -> list[Path]:
    """Return the island folders that hold a checkpoint, by island index."""
    found = [path for path in folder.glob("island-*") if list_checkpoints(path / "checkpoints")]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def launch_islands(
    loaded: LoadedConfig,
    plan: Plan,
    folder: Path,
    environ: Mapping[str, str],
    events: EventLog,
    most_opening_lines: int | None = None,
    *,
    sized: bool = False,
) -> list[RunOutcome]:
    """Run all islands to the end, or until one fails for good; return the outcome of each.

    Args:
        most_opening_lines: notices that are shown before the first step; None: all.
        sized: an earlier start without islands has chosen the plan's micro-batch.

    Raises:
        ClusterError: an island cannot be started at all.
    """
    config = loaded.config
    count, restarts = config.islands.groups, config.launch.restarts
    changes = config.islands.changes_members
    for index in range(count):  # one line now, not one of each worker
        open_member_keys(config.islands.key, config.islands.keys, index, typer.echo)
    if not read_token(environ):  # every user of this machine can connect to their port
        environ = {**environ, TOKEN: new_token()}
    if config.islands.owned:
        _check_same_owners(folder, count)
    first = island_folder(folder, 0)
    view = LiveView(first, stream=sys.stdout, colour=True, most_opening_lines=most_opening_lines)
    for old, new in _rename_surplus_islands(folder, count):
        typer.echo(f"{old.name} does not go on: what it holds is kept in {new}")
    shares = count > 1 or restarts > 0
    imports = worker_imports(config.model) if shares else ()
    with (
        StopSignals() as stop,
        contextlib.closing(Guardian()) as guardian,
        contextlib.closing(SharedForkServer(imports, guardian)) as server,
    ):
        for attempt in range(restarts + 1):
            if not (
                config.islands.owned or changes
            ):  # also for one that died before its first checkpoint
                _copy_island_checkpoints(folder, count)
            _write_folders(loaded, plan, folder, sized=sized)
            folders = [island_folder(folder, index) for index in range(count)]
            islands = [_IslandSupervisor(one, guardian, attempt, server) for one in folders]
            codes = _run_islands(islands, environ, view, stop, restarts if changes else 0)
            if size := _recorded_micro_batch(loaded, plan.batch, folder):  # for resumes of the run
                write_derived(folder / "run.toml", "train", micro_batch=size)
            lost = [island for island, code in enumerate(codes) if code not in STOPPED]
            if not lost or stop.first is not None or attempt == restarts or changes:
                break
            if any(codes[island] in USER_MUST_ACT for island in lost):
                break
            for island in lost[lost[0] == 0 :]:  # the first island's own events are on the terminal
                text = f"island {island}: {islands[island].why(codes[island])}"
                EventLog(islands[0].folder / "events.jsonl", None).emit("notice", text=text)
            events.emit("restarting", attempt=attempt + 1, of=restarts, islands=lost)
    view.finish()
    return [
        island.outcome(code, stop.first, attempt + 1)
        for island, code in zip(islands, codes, strict=True)
    ]


def _recorded_micro_batch(loaded: LoadedConfig, batch: int, folder: Path) -> int:
    """Return the least micro-batch that the islands chose at an earlier start.

    0: they have chosen none for this batch, or the user chose it.
    """
    if loaded.origins.get(MICRO_BATCH) != "derived":
        return 0
    records = [read_object(path) for path in folder.glob("island-*/plan.json")]
    records = [one for one in records if one.get("batch") == batch]
    # Up to 0.2.0 a started run lost the mark, and all islands had the same size.
    sizes = [one.get("micro_batch", 0) for one in records if one.get("sized", True)]
    return min((size for size in sizes if size), default=0)


def _write_folders(loaded: LoadedConfig, plan: Plan, folder: Path, *, sized: bool) -> None:
    """Write a run.toml and a plan for every island; all meet on a free port of this machine.

    If the user leaves the micro-batch open, the islands choose it at their first start, and keep
    it: at a later start every island gets the least of their choices.

    Args:
        loaded: the run's configuration.
        plan: the run's.
        folder: the run's, with the islands' folders.
        sized: the plan's micro-batch was chosen by an earlier start.
    """
    islands = loaded.config.islands
    listening = islands.groups if islands.changes_members else 1
    # The ranks of an island that comes and goes listen at ports in a row.
    ranks = loaded.config.launch.processes if islands.changes_members else 1
    at = ",".join(f"127.0.0.1:{port}" for port in _free_ports(listening, ranks))
    kept = _recorded_micro_batch(loaded, plan.batch, folder)
    is_open_size = loaded.origins.get(MICRO_BATCH) == "derived"
    data = loaded.config.data
    if islands.owned:
        data = replace(data, owners=list_owner_names(loaded.config))
    for index in range(islands.groups):
        own = LoadedConfig(loaded.config, dict(loaded.origins), [])
        own.config = replace(
            loaded.config,
            data=data,
            islands=replace(islands, at=at, index=index),
            run=replace(loaded.config.run, folder=str(folder), name=f"island-{index}"),
            launch=replace(loaded.config.launch, restarts=0),
        )
        path = island_folder(folder, index)
        path.mkdir(parents=True, exist_ok=True)
        settled, chosen = restore_choice(plan, collect_layout_keys(own.config.layout), path)
        least = replace(settled, micro_batch=0) if is_open_size else settled
        settled = settle_batch(least, at_most=kept or plan.micro_batch)
        if is_open_size:
            own.replace("train", "derived", micro_batch=settled.micro_batch)
        write_atomically(path / "run.toml", to_toml(own))
        known = {"chosen": chosen, "sized": sized or kept > 0 or not is_open_size}
        write_atomically(path / "plan.json", settled.to_json(known))


def _free_ports(count: int, width: int) -> list[int]:
    """Return free ports of this machine, each the first of `width` free ones in a row."""
    found = list[int]()
    while len(found) < count:
        first = free_port()
        near = any(abs(first - other) < width for other in found)
        if not near and all(map(is_free_port, range(first + 1, first + width))):
            found.append(first)
    return found


def _check_same_owners(folder: Path, count: int) -> None:
    """Refuse a resume of data owners with another number of groups, which keep their states.

    Raises:
        ConfigError: some checkpoints lack, or there are those of other groups.
    """
    held = [int(path.name.rpartition("-")[2]) for path in island_folders(folder)]
    if held and held != list(range(count)):
        raise ConfigError(
            f"islands.count, islands.concurrent: {folder} has checkpoints of {len(held)} islands, "
            f"and {count} are started: an owner's state is in its own; try: the run.toml of the "
            f"run, or bring the folders back from a copy"
        )


def _rename_surplus_islands(folder: Path, count: int) -> list[tuple[Path, Path]]:
    """Rename the folders of islands beyond `count`; return old and new names.

    A folder left in place would rejoin with weights of other rounds if the run later had more
    islands again.
    """
    moved = []
    for own in island_folders(folder):
        if int(own.name.rpartition("-")[2]) >= count:
            new, tries = own.with_name(f"set-aside-{own.name}"), 1
            while new.exists():
                tries += 1
                new = own.with_name(f"set-aside-{own.name}-{tries}")
            moved.append((own, own.rename(new)))
    return moved


def _copy_island_checkpoints(folder: Path, count: int) -> None:
    """Copy the checkpoints of the first island that has some to every island that has none.

    All checkpoints are copied: the islands agree on their newest common round only when they meet.
    If no island holds a checkpoint, all islands begin from the checkpoints of the run itself, which
    may have begun without islands.
    """
    holders = island_folders(folder) or [folder]
    given = list_checkpoints(holders[0] / "checkpoints")
    for index in range(count):
        own = island_folder(folder, index) / "checkpoints"
        if list_checkpoints(own):
            continue
        for source in given:
            copy = make_temporary_path(own / source.path.name)  # partial copies have another name
            shutil.copytree(source.path, copy)
            copy.rename(own / source.path.name)


def _run_islands(
    islands: Sequence[_IslandSupervisor],
    environ: Mapping[str, str],
    view: LiveView,
    stop: StopSignals,
    restarts: int = 0,
) -> list[int]:
    """Start every island, wait until all have ended, and return their exit codes.

    Args:
        restarts: times that an island is started again while the others go on.
    """
    for island in islands:
        island.start(len(islands), environ)
    told = False
    try:
        while any(island.process.poll() is None for island in islands):
            if stop.first is not None and not told:
                graces = [island.grace_s() for island in islands]
                told, until_s = True, time.monotonic() + GRACE_S + max(graces)
                for island in islands:
                    island.ask_to_stop()
            if told and (stop.insists or time.monotonic() > until_s):
                break
            if restarts and not told:
                _start_lost_islands(islands, restarts, environ)
            if any(island.failed_to_start for island in islands):
                for island in islands:  # they would wait in vain for the lost island
                    island.ask_to_stop()
            view.tick()
            time.sleep(LOOK_S)
    finally:
        for island in islands:
            island.kill()
    return [island.ended() for island in islands]


def _start_lost_islands(
    islands: Sequence[_IslandSupervisor], restarts: int, environ: Mapping[str, str]
) -> None:
    """Start lost islands again, and stop those that came back after the end of the run."""
    for island in islands:
        island.start_again_if_lost(restarts, len(islands), environ)
    if any(island.process.poll() == 0 for island in islands):
        for island in islands:  # nobody is left who would give it a seat
            island.stop_if_late()


class _IslandSupervisor:
    """Handle of one island's supervisor process.

    Args:
        attempt: earlier restarts of the whole run.
        server: forks the workers; None: they are programs.
    """

    def __init__(
        self,
        folder: Path,
        guardian: Guardian,
        attempt: int = 0,
        server: SharedForkServer | None = None,
    ) -> None:
        self.folder, self.guardian, self.attempt, self.server = folder, guardian, attempt, server
        self.log_path = folder / "logs" / "supervisor.log"
        self.log_start, self._asked, self.is_late = 0, False, False

    def start(self, count: int, environ: Mapping[str, str]) -> None:
        """Start the supervisor as one of `count` islands.

        Raises:
            ClusterError: the process cannot be started.
        """
        processes = load_config(self.folder / "run.toml").config.launch.processes
        # The workers' own, so that the supervisor knows what a shared server's forks have.
        shared = make_shared_environment(environ, count * processes)
        self.log_path.parent.mkdir(exist_ok=True)
        try:
            with self.log_path.open("ab") as log, contextlib.ExitStack() as files:
                self.log_start = log.tell()
                words, kept = [str(self.folder), str(self.attempt)], list[int]()
                if self.server and (channel := self.server.open_channel(shared, self.folder)):
                    kept.append(files.enter_context(channel).fileno())
                self.process = subprocess.Popen(
                    [sys.executable, "-m", SUPERVISOR, *words, *map(str, kept)],
                    env=shared,
                    pass_fds=kept,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=make_parent_death_hook(os.getpid()),
                )
        except (OSError, subprocess.SubprocessError) as failure:
            raise ClusterError(f"{self.folder.name} cannot be started: {failure}") from failure
        self.guardian.register("+", self.process.pid)

    def grace_s(self) -> float:
        """Return the seconds that the island's supervisor waits for its workers to stop."""
        config = load_config(self.folder / "run.toml").config
        step_s = MetricsProgress(self.folder / "metrics.jsonl").step_s()
        steps = count_steps_to_save(config)
        return StopGrace(self.folder, config.launch.grace_s, steps).seconds(step_s)

    def start_again_if_lost(self, most: int, count: int, environ: Mapping[str, str]) -> None:
        """Start the supervisor again if its island was lost, `most` times in all.

        The other islands go on meanwhile, and take it in.
        """
        code = self.process.poll()
        if code is None or code in (*STOPPED, *USER_MUST_ACT) or self.attempt >= most:
            return
        self.attempt += 1
        events = EventLog(self.folder / "events.jsonl", None)
        events.emit("restarting", attempt=self.attempt, of=most, islands=[self.index])
        self.start(count, environ)

    def stop_if_late(self) -> None:
        """Stop an island that came back after the others had completed the run."""
        if self.process.poll() is None and not self.is_late and self._waits_for_seat():
            self.is_late = True
            self.ask_to_stop()

    def _waits_for_seat(self) -> bool:
        """Return whether the island was started again, and has no seat since."""
        names = list[str]()
        with contextlib.suppress(OSError):
            lines = (self.folder / "events.jsonl").read_bytes().splitlines()
            names = [str(event["event"]) for line in lines if (event := parse_event(line))]
        again = [place for place, name in enumerate(names) if name == "restarting"]
        return bool(again) and "islands_met" not in names[again[-1] :]

    @property
    def index(self) -> int:
        """Return the number of the island."""
        return int(self.folder.name.rpartition("-")[2])

    @property
    def failed_to_start(self) -> bool:
        """Return whether the island ended before it started a worker; it cannot take part."""
        return self.process.poll() not in (None, *STOPPED) and bool(self._refusal_line())

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the supervisor, once."""
        if self.process.poll() is None and not self._asked:
            self._asked = True
            self.process.terminate()

    def ended(self) -> int:
        """Wait for the supervisor and return its exit code.

        A stop that came before the supervisor handled signals counts as a stop as well.
        """
        code = self.process.wait()
        return 128 - code if self._asked and code in ASKED else code

    def kill(self) -> None:
        """Kill the supervisor with SIGKILL; its workers die with it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.guardian.register("-", self.process.pid)

    def outcome(self, code: int, signal_number: int | None, attempts: int) -> RunOutcome:
        """Return the island's outcome, as `supervise` returns it for a run without islands.

        The outcome trusts the exit code; `ending.py` checks it against the disk.

        Args:
            signal_number: the signal by which all islands were asked to stop, if one was.
        """
        if code in STOPPED and self.is_late:
            return RunOutcome("finished", 0, attempts, "")
        if code in STOPPED:
            number = signal_number or max(0, code - 128)
            if not number:
                return RunOutcome("finished", 0, attempts, "")
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            return RunOutcome("stopped", 128 + number, attempts, f"stopped by {name}")
        if code == UNSAVED_CODE:
            return RunOutcome("unsaved", 1, attempts, "the last checkpoint could not be written")
        return RunOutcome("failed", code, attempts, self.why(code))

    def why(self, code: int) -> str:
        """Return the supervisor's error, or else the error or exit status of its worker."""
        if said := self._refusal_line():
            return said
        for path in sorted(self.log_path.parent.glob("rank-*.error.json")):
            with contextlib.suppress(OSError, ValueError, KeyError):
                return str(json.loads(path.read_text(encoding="utf-8"))["line"])
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        return f"ended with {how}; log: {self.log_path.parent}"

    def _refusal_line(self) -> str:
        """Return the error line with which the supervisor refused to start; "" if it started."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(self.log_start)
                words = log.read().decode(errors="replace")
        except OSError:
            return ""
        found = [line for line in words.splitlines() if line.startswith(REFUSED)]
        return found[0].removeprefix(REFUSED) if found else ""


def check_islands_resumable(folder: Path) -> None:
    """Refuse to resume a run of islands without any checkpoint.

    Raises:
        ConfigError: no island holds a complete checkpoint.
    """
    if not island_folders(folder):
        RunLease(folder, folder.name).check()  # a run before its first save has none yet
        raise ConfigError(
            f"--resume {folder}: none of its islands holds a complete checkpoint; start anew with "
            f"shoal train {folder}/run.toml"
        )
