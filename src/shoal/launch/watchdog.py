"""Watchdog process: watch the ranks of a run that another launcher started, from outside.

    python -m shoal.launch.watchdog COUNT [ADDRESS …]     started on each node by its first rank
                                                     (trainer/process/watchdog_client.py)

It makes a page for each of COUNT ranks (wire/watch_page.py) and writes their paths as one line of
JSON. It reads one line, with the ranks of all nodes, and watches until this node's processes, or
its input, have ended. With addresses it is node 0's of several, listens at the first of them, and
watches all ranks; the watchdogs of other nodes report theirs (launch/watch/remote_nodes.py).

It reports a hang in the run folder's events.jsonl and on standard error, on several nodes also on
that of the rank's node. A user's own loop may do anything between two steps, for any time: a busy
rank is reported, and never ended. A rank that cannot recover is killed, and the launcher ends or
restarts the others; those left after `REST_S` are killed too. A rank that ends without closing its
page was killed, or left by `os._exit`: that is reported for the first one only, since the others
end because of it. After the end, the run's report replaces it (launch/end_report.py).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shoal.base.errors import ShoalError
from shoal.base.runlog.events import EventLog
from shoal.base.standard_streams import write_error
from shoal.base.text.event_sentences import event_text
from shoal.launch.end_report import replace_process_by_report
from shoal.launch.watch.blamed_rank import Hang
from shoal.launch.watch.hang_watch import EVERY_S, HangWatch
from shoal.launch.watch.page_reader import PageReader
from shoal.launch.watch.remote_nodes import (
    JOIN_S,
    REST_S,
    MultiNodeWatch,
    Node,
    NodeReporter,
    RemoteRank,
    WatchdogServer,
)
from shoal.launch.worker_failures import exit_text
from shoal.wire.authenticated_stream import AuthenticatedConnection

LAST_S = 1.0
"""Seconds to wait for the end of a rank that has closed its pipes."""
THEMSELVES_S = 3.0
"""Seconds in which ranks may end themselves before they are killed."""
Pages = Mapping[int, PageReader] | Sequence[PageReader]
"""The pages of ranks, by their numbers."""


class ForeignProcess:
    """Process that is no child of this one, with the interface of a worker that a watch uses."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank, self.pid = rank, pid
        self.file = os.pidfd_open(pid)  # stays valid if the pid is reused
        self._code: int | None = None
        self.how = "ended"

    @property
    def code(self) -> int | None:
        """Return None while it runs, else its exit code.

        The kernel reports the code until the process's launcher has read it; after that the code is
        0.
        """
        if self._code is None and select.select([self.file], [], [], 0)[0]:
            self._code = 0
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, *_, status = _read_stat(self.pid)
                if state == "Z":
                    self._code = os.waitstatus_to_exitcode(int(status))
                    self.how = exit_text(self._code)
        return self._code

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.file, signal.SIGKILL)


def _read_stat(pid: int) -> list[str]:
    """Return the kernel's fields of a process: first its state's letter, last its exit status."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()


class CommandInput:
    """Input lines from the rank that started this process; `ended` once it has ended.

    Attributes:
        folders: of further runs of the ranks, which get reports too.
    """

    def __init__(self) -> None:
        self._come, self.ended = b"", False
        self.folders: list[Path] = []

    def read_line(
        self, wait_s: float = 0.0, ranks: Sequence[ForeignProcess | RemoteRank] = ()
    ) -> dict[str, Any] | None:
        """Return the next line; None if none comes in time, or before one of `ranks` ends."""
        until_s = time.monotonic() + wait_s
        files = [one.file for one in ranks if isinstance(one, ForeignProcess) and one.code is None]
        while b"\n" not in self._come and not self.ended:
            left_s = max(0.0, until_s - time.monotonic())
            if 0 not in select.select([0, *files], [], [], left_s)[0]:
                return None
            more = os.read(0, 1 << 16)
            self._come, self.ended = self._come + more, not more
        line, found, self._come = self._come.partition(b"\n")
        told = json.loads(line) if found else None
        if told and told.get("further"):
            self.folders.append(Path(told["further"]))
        return told


class EventWriter:
    """Writer of events on nodes that own a disk, and of lines for a person.

    Args:
        ranks: of this node.
        keeps: whether this node writes the folder's events.
    """

    def __init__(self, folder: Path | None, ranks: Sequence[int], *, keeps: bool) -> None:
        self.folder, self.ranks, self.keeps = folder, ranks, keeps
        self._log: EventLog | None = None
        if keeps and folder is not None and folder.is_dir():  # else its start may be refused yet
            self._make_logs_folder()

    def report(self, event: str, **fields: Any) -> None:
        """Write an event to the run folder, if this node owns one, and its line to stderr."""
        self._write(event, fields)
        self._show(event, fields)

    def order(self, order: dict[str, Any]) -> None:
        """Write an event as node 0 ordered; print its line only if the rank is on this node."""
        event, fields, accounts = order["say"], order["fields"], order.get("accounts", "")
        if self.keeps and accounts and self.folder is not None:
            with contextlib.suppress(OSError):
                self._make_logs_folder()
                (self.folder / "logs" / Path(fields["stacks"]).name).write_text(
                    accounts, encoding="utf-8"
                )
        self._write(event, fields)
        if fields.get("rank") in self.ranks or order.get("own"):
            self._show(event, fields)

    def _make_logs_folder(self) -> None:
        if self.folder is not None:
            with contextlib.suppress(OSError):
                (self.folder / "logs").mkdir(parents=True, exist_ok=True)

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        if self.keeps and self.folder is not None:
            if self._log is None:
                self._make_logs_folder()
                self._log = EventLog(self.folder / "events.jsonl", None)
            self._log.emit(event, **fields)

    def _show(self, event: str, fields: dict[str, Any]) -> None:
        text = event_text({"event": event, **fields})
        if event == "collectives_differ":  # as the launcher does at the end of a run
            text = str(fields["text"])
        if text:
            write_error(f"shoal: {text}")


def main() -> int:
    """Watch until the ranks have ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the ranks, which may save
    count, addresses = int(sys.argv[1]), sys.argv[2:]
    watch = MultiNodeWatch(Path(os.devnull), lambda event, **fields: None, math.inf, twice=True)
    listener = open_listener(addresses)
    at = None if listener is None else listener.getsockname()[:2]
    sys.stdout.write(f"{json.dumps({'paths': watch.start_attempt(count), 'at': at})}\n")
    sys.stdout.flush()
    said = CommandInput()
    asked = None
    while asked is None and not said.ended:
        asked = said.read_line(JOIN_S)
    if not asked:
        return 0
    nodes = [Node(tuple(o["ranks"]), tuple(o["pids"]), o["host"]) for o in asked["nodes"]]
    here = nodes[asked["number"]]
    folder = Path(asked["folder"]) if asked["folder"] else None
    teller = EventWriter(folder, here.ranks, keeps=asked["number"] == 0)
    try:
        ranks = [ForeignProcess(rank, pid) for rank, pid in zip(here.ranks, here.pids, strict=True)]
    except OSError:  # one has ended already
        return 0
    token = str(asked["token"]).encode()
    watch.keep(folder, asked["number"], here.ranks)
    if asked["number"] > 0:
        if connection := _connect(tuple(asked["at"]), token, ranks, teller.report):
            number = asked["number"]
            follower = NodeReporter(connection, number, nodes, watch.pages, ranks, teller.order)
            _run_follower(watch, follower, ranks, teller, said)
    elif listener is not None:
        _watch_all_nodes(watch, ranks, WatchdogServer(listener, token, nodes), teller, said)
    else:
        _watch_node(watch, ranks, teller, said)
    watch.records.append_steps(watch.own)
    watch.sampler.close()
    while said.read_line() is not None:  # of a run that began just before the end
        pass
    if folder is not None and teller.keeps:
        replace_process_by_report([watch.records.current_folder(), *said.folders])
    return 0


def open_listener(addresses: Sequence[str]) -> socket.socket | None:
    """Listen at the first address that belongs to this machine; return None without one."""
    for address in addresses:
        with contextlib.suppress(OSError):
            family, _, _, _, found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
            return socket.create_server((str(found[0]), 0), family=family, backlog=1024)
    return None


def _watch_node(
    watch: MultiNodeWatch, ranks: list[ForeignProcess], teller: EventWriter, said: CommandInput
) -> None:
    """Watch the ranks of a run on one node."""
    watch.emit = watch.slow.emit = teller.report
    unlike = partial(watch.compare, ranks, dead=True)
    ended = False
    while not said.ended and any(rank.code is None for rank in ranks):
        said.read_line(EVERY_S, ranks)
        ended = ended or report_end(ranks, watch.pages, teller.report, unlike)
        if hang := watch.poll(ranks):
            end_ranks(ranks, watch.pages, hang)
            return
    if not ended:
        wait_for_first_end(ranks)
        report_end(ranks, watch.pages, teller.report, unlike)


def _watch_all_nodes(
    watch: MultiNodeWatch,
    ranks: list[ForeignProcess],
    hub: WatchdogServer,
    teller: EventWriter,
    said: CommandInput,
) -> None:
    """Watch the ranks of all nodes, on node 0."""

    def emit(event: str, **fields: Any) -> None:
        teller.report(event, **fields)
        accounts = ""
        if fields.get("stacks"):
            with contextlib.suppress(OSError):
                accounts = Path(fields["stacks"]).read_text(encoding="utf-8")
        hub.order({"say": event, "fields": fields, "accounts": accounts})

    watch.emit = watch.slow.emit = emit
    watch.add_nodes(hub)
    both: dict[int, ForeignProcess | RemoteRank] = {**{one.rank: one for one in ranks}, **hub.far}
    everyone = [both[rank] for rank in sorted(both)]

    def unlike() -> Hang | None:
        for page in watch.pages:  # the other nodes' ranks' calls come with their answers
            page.ask()
        hub.flush_orders(1.0)
        hub.serve(1.0)
        return watch.compare(everyone, dead=True)

    ended = False
    while not said.ended and any(rank.code is None for rank in ranks):
        hub.serve(EVERY_S)
        said.read_line()
        ended = ended or report_end(everyone, watch.pages, emit, unlike)
        if not hub.ready:
            if what := hub.describe_missing():
                _report_unwatched(emit, what)
                return
        elif hang := watch.poll(everyone):
            hub.order({"end": vars(hang)})
            hub.flush_orders(1.0)
            end_ranks(ranks, watch.pages, hang)
            return
    if not ended:
        wait_for_first_end(ranks)
        report_end(everyone, watch.pages, emit, unlike)
    hub.close()


def wait_for_first_end(ranks: Sequence[ForeignProcess]) -> None:
    """Wait until the first rank has ended: a process closes its pipes a moment before."""
    if all(one.code is None for one in ranks):
        select.select([one.file for one in ranks], [], [], LAST_S)


def report_end(
    ranks: Sequence[ForeignProcess | RemoteRank],
    pages: Sequence[PageReader],
    tell: Callable[..., None],
    unlike: Callable[[], Hang | None],
) -> bool:
    """Report why the first ended rank ended, unless it was reported; return whether one has ended.

    A rank that ended by SIGTERM counts last of those that are found together: its launcher sends
    that to the others.

    Args:
        unlike: reports ranks that made different calls: gloo aborts if their sizes differ.
    """
    ended = [(one, pages[one.rank].read()) for one in ranks if one.code is not None]
    if not ended:
        return False
    if unlike() is not None:
        return True
    one, told = min(ended, key=lambda pair: (pair[0].code == -signal.SIGTERM, pair[1].changed_s))
    if not told.live:
        return True  # it ended normally, or has reported its error
    how = one.how if isinstance(one, ForeignProcess) else "ended"
    where = f"after step {told.step}, in {told.activity}"
    met = next((calls for page in pages if (calls := page.read().inside)), "")
    if one.code == -signal.SIGABRT and met and not told.inside:  # gloo aborts where sizes differ
        where += f", in no call of the run while others were in {met}: a collective of its own?"
    words = f"left {where}: something in it calls os._exit" if how.startswith("exit") else ""
    how = f"{how}{'' if words else f' {where}'}"
    host = pages[one.rank].host
    tell("worker_died", rank=one.rank, pid=one.pid, host=host, how=how, traceback=words)
    return True


def _run_follower(
    watch: HangWatch,
    follower: NodeReporter,
    ranks: list[ForeignProcess],
    teller: EventWriter,
    said: CommandInput,
) -> None:
    """Report this node's ranks to node 0, on every other node."""
    unwritten = None  # devices, until this node is known to own a disk
    while not follower.over and any(rank.code is None for rank in ranks):
        watch.records.append_steps(watch.own)
        if (found := watch.sampler.poll()) is not None:
            follower.sample = unwritten = found
        if teller.keeps and unwritten is not None:
            watch.devices.append_sample(follower.nodes[follower.number].host, unwritten)
            unwritten = None
        if teller.keeps:
            watch.processes.append_sample(ranks, watch.own)
        if not said.ended and (told := said.read_line()) is not None:
            teller.keeps = bool(told.get("keeps"))
        try:
            hang = follower.turn()
        except OSError:  # node 0's watchdog has ended; in a normal end this node's ranks will too
            if _wait_for_end(ranks):
                host = follower.nodes[0].host
                _report_unwatched(teller.report, f"the watch on {host} has ended")
            return
        if hang is not None:
            own = follower.nodes[follower.number].ranks
            end_ranks(ranks, dict(zip(own, follower.pages.pages, strict=True)), hang)
            return
    follower.close()


def _connect(
    at: tuple[str, int], token: bytes, ranks: Sequence[ForeignProcess], tell: Callable[..., None]
) -> AuthenticatedConnection | None:
    """Connect to node 0; return None if it does not answer, or the ranks have ended.

    A missing answer is reported.
    """
    until_s = time.monotonic() + JOIN_S
    while any(rank.code is None for rank in ranks):
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            _report_unwatched(tell, f"nobody answers at {at[0]}:{at[1]}, where node 0 watches")
            return None
        try:
            made = socket.create_connection(at, timeout=left_s)
            return AuthenticatedConnection(made, token, f"{at[0]}:{at[1]}")
        except (OSError, ShoalError):
            time.sleep(EVERY_S)
    return None


def _report_unwatched(emit: Callable[..., None], what: str) -> None:
    emit("notice", text=f"hangs of this run are not watched from now on: {what}")


def _wait_for_end(ranks: Sequence[ForeignProcess]) -> bool:
    """Wait up to REST_S for the end of the ranks; return whether one still runs."""
    until_s = time.monotonic() + REST_S
    while left := any(rank.code is None for rank in ranks):
        if time.monotonic() > until_s:
            break
        time.sleep(EVERY_S)
    return left


def end_ranks(ranks: Sequence[ForeignProcess], pages: Pages, hang: Hang) -> None:
    """Kill the rank that hangs, and the others if the launcher does not end them.

    If the user must change something, all end themselves first, with the exit status for that.
    """
    if hang.status:
        for rank in ranks:
            pages[rank.rank].end(hang.status)
        until_s = time.monotonic() + THEMSELVES_S
        while any(rank.code is None for rank in ranks) and time.monotonic() < until_s:
            time.sleep(EVERY_S)
    for rank in ranks:
        if rank.rank == hang.rank:
            rank.kill()
    _wait_for_end(ranks)
    for rank in ranks:
        rank.kill()


if __name__ == "__main__":
    sys.exit(main())
