"""Report of an error that ends a script; `excepthook.py` imports this module when one does.

line         for the screen, with the user's file and line; once, if every rank raises it
user frames  the last line of any other traceback, most of whose frames are Shoal's and torch's
Ctrl-C       what is saved, and how the script goes on
lost_peer    the error of a rank that lost a peer, which reports its own error
CrashRecorder  for the run folder, from which `shoal diagnose` reads why a rank died
"""

from __future__ import annotations

import atexit
import contextlib
import linecache
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from torch.optim import Optimizer

from shoal.base.errors import ClusterError, ConfigError, ShoalError
from shoal.base.runlog.atomic_files import list_saved_steps
from shoal.base.standard_streams import flush_streams, write_error
from shoal.base.text.argument_names import rename_error
from shoal.base.text.user_frames import frame_text, list_user_frames, user_line
from shoal.fabric import World
from shoal.fabric.rendezvous.shared_errors import print_shared_error, read_ranks
from shoal.wire import phases

if TYPE_CHECKING:
    from shoal.checkpoint.format.lease import RunLease
    from shoal.trainer.metrics_recorder import MetricsRecorder

LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Messages of gloo on the ranks that wait for a dead one."""
TRACEBACK_LINES = 25
ORDER = ("model", "optimizer", "loss")
"""First parameters of `shoal.parallelize`."""
RAISED = "raised in "
"""Begin of the note on the user's own frames."""
CALLERS = 3
"""Largest number of outer frames in that note."""
DOOR = "shoal.neighbours.library_loop"
"""Module of scripts of other libraries, which save by calls of their own."""


STARTED = re.compile(
    r"(events|ranks|plan|owner|phase)\.jsonl?(\.tmp)?|owner\.lock|\.probe-\d+|\.\w+\.tmp\S*"
)
"""Files that a start writes before its first step."""


class CrashedRun(Protocol):
    """The attributes of a run that its last lines need."""

    recorder: MetricsRecorder
    skips: Any
    step_count: int

    @property
    def world(self) -> World:
        """The processes of the run."""


class CrashedProcess(Protocol):
    """The attributes of the exception hook (`ShoalErrorHook`) that a report needs."""

    ordinary: Callable[..., Any]
    world: World | None
    recorded: tuple[MetricsRecorder, RunLease | None] | None
    run: Callable[[], CrashedRun | None] | None


def report_crash(
    hook: CrashedProcess,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Print an uncaught exception, record it, and end the process with its exit status.

    Args:
        hook: the hook in place, with the processes and the run.
        kind, error, trace: as `sys.excepthook` gets them.

    Raises:
        SystemExit: one process ends by a ShoalError; of several ranks each ends by `os._exit`.
    """
    rename_error(error)
    world = hook.world
    told = error if isinstance(error, ShoalError) else convert_lost_peer_error(error, world)
    if told is None or os.environ.get("SHOAL_TRACEBACK"):
        _add_user_frames(error, trace)
        hook.ordinary(kind, error, trace)
    else:
        _print_line(told, trace, world, is_own=told is error)
    asked, prompt = isinstance(error, KeyboardInterrupt), hasattr(sys, "ps1")
    run = hook.run() if hook.run is not None and DOOR not in sys.modules else None
    if asked and not prompt and run is not None and run.world.is_first:
        write_error(f"shoal: {format_interrupt_line(run)}")
    if not prompt:
        close_watch_page()
        if hook.recorded is not None:
            own = error if told in (None, error) and not asked else None
            code = told.exit_code if told is not None else 1
            record_crash(*hook.recorded, own, trace, code)
    if told is None:
        goes_on = asked or prompt
        if world is not None and world.size > 1 and not goes_on:
            # Communication with peers may never end, and the teardown would wait for it.
            atexit._run_exitfuncs()
            flush_streams()
            os._exit(1)
        return
    flush_streams()
    if world is not None and world.size > 1:
        # The process group is alive and cannot be left: the peers are still in the step, or
        # gone. The interpreter's teardown would wait for gloo's threads or abort in them, and
        # lose the exit status. Peers then see a closed connection. atexit functions do not run.
        os._exit(told.exit_code)
    raise SystemExit(told.exit_code)  # CPython takes the status of a hook that raises this


def _print_line(
    told: ShoalError, trace: TracebackType | None, world: World | None, *, is_own: bool
) -> None:
    """Print the line of an error: once for all ranks if each of them raises it.

    Args:
        is_own: this rank raised it; False: it lost a peer.
    """
    line = format_error_line(told, trace, None)
    rank, size = (world.rank, world.size) if world is not None else read_ranks(os.environ)
    if size == 1:
        write_error(line)
        return
    if is_own and print_shared_error(
        line, (rank, size), lambda: write_error(f"{line} (on all {size} ranks)")
    ):
        if rank:
            write_error(f"[rank {rank}] shoal: exit status {told.exit_code}, as rank 0 prints")
        return
    write_error(f"[rank {rank}] {line}")


def _add_user_frames(error: BaseException, trace: TracebackType | None) -> None:
    """Add the user's own frames as a note, which stands behind the traceback."""
    note = "" if isinstance(error, KeyboardInterrupt) else _describe_user_frames(trace)
    if note and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _describe_user_frames(trace: TracebackType | None) -> str:
    """Return a line on the user's own frames of a traceback: innermost first, then its callers.

    Returns:
        "raised in FILE:LINE, in FUNCTION: CODE", with the callers; "" if all frames are the user's,
        or none is.
    """
    found, every = list_user_frames(trace), 0
    while trace is not None:
        trace, every = trace.tb_next, every + 1
    if not found or len(found) == every:
        return ""
    *outer, (frame, line) = found
    code = linecache.getline(frame.f_code.co_filename, line).strip()
    callers = "; ".join(_frame_words(one) for one in reversed(outer[-CALLERS:]))
    called = f" (called from {callers})" if callers else ""
    return f"{RAISED}{_frame_words((frame, line))}{f': {code}' if code else ''}{called}"


def _frame_words(one: tuple[FrameType, int]) -> str:
    name = one[0].f_code.co_name
    return f"{frame_text(*one)}{'' if name == '<module>' else f', in {name}'}"


def format_interrupt_line(run: CrashedRun) -> str:
    """Return the line of Ctrl-C in a loop: what is saved, what is lost, and how to go on."""
    step, folder = run.step_count, run.recorder.folder
    where = f"Ctrl-C at step {step}" if step else "Ctrl-C before the first step"
    if folder is None:
        return (
            f"{where}: nothing was saved: the run has no folder; try: "
            f'shoal.parallelize(…, folder="runs/x"), with run.restore() and run.save()'
        )
    saved = max((one for one in list_saved_steps(folder)), default=None)
    if saved is None:
        return (
            f"{where}: nothing was saved: no run.save() was reached, so the script begins at its "
            f"first step again; try: run.save() more often, with run.restore() before the loop"
        )
    lost = f"; steps {saved + 1} – {step} are lost" if step > saved + 1 else ""
    lost = f"; step {step} is lost" if step == saved + 1 else lost
    return (
        f"{where}: the newest checkpoint in {folder} is of step {saved}{lost}; start the script "
        f"again, and run.restore() goes on from there"
    )


def format_error_line(error: ShoalError, trace: TracebackType | None, world: World | None) -> str:
    """Return `shoal: FILE:LINE: message` for an error, at the innermost line of user code."""
    rank = f"[rank {world.rank}] " if world is not None and world.size > 1 else ""
    place = user_line(trace)
    text = " ".join(str(error).split("\n"))
    return f"{rank}shoal: {f'{place}: ' if place else ''}{text}"


def convert_lost_peer_error(error: BaseException, world: World | None) -> ShoalError | None:
    """Return the one-line error of a rank whose peer is gone; None for any other error."""
    if world is None or world.size == 1 or not isinstance(error, RuntimeError):
        return None
    from shoal.fabric.collectives.link_failures import dead_link_text

    if told := dead_link_text(str(error)):
        return ClusterError(told)
    for words in LOST_PEER:
        if words in str(error):
            return ClusterError(f"another rank ended ({words}); its own line says why")
    return None


def close_watch_page() -> None:
    """Report in the watch page that this process ends and prints its own error."""
    if phases.page is not None:
        phases.page.close()


def record_crash(
    recorder: MetricsRecorder,
    lease: RunLease | None,
    error: BaseException | None,
    trace: TracebackType | None,
    code: int,
) -> None:
    """Record the error that ends a user's own loop in the run folder, and release the folder.

    Args:
        recorder: writes events into the run folder.
        lease: of the folder; None: this process does not hold it.
        error: None: another rank failed, and reports it itself.
        trace: of the error.
        code: exit status.
    """
    if error is not None:
        from traceback import format_exception

        error.__notes__ = [
            note for note in getattr(error, "__notes__", ()) if not note.startswith(RAISED)
        ]
        ours = isinstance(error, ShoalError)
        lines = [str(error)] if ours else "".join(format_exception(error)).splitlines()
        told = {"how": f"exit code {code}", "traceback": "\n".join(lines[-TRACEBACK_LINES:])}
        if frames := list_user_frames(trace):
            told["at"] = _frame_words(frames[-1])
        with contextlib.suppress(Exception):  # a listener of the user's may raise
            recorder.events.emit("worker_died", pid=os.getpid(), step=None, **told)
    if lease is not None:
        lease.release()


def explain_refusal(
    error: Exception, given: Sequence[Any], named: Mapping[str, Any], missing: Sequence[Path]
) -> None:
    """Remove what a refused start made, and name in its error the arguments of the user's loop.

    Args:
        error: with which the start ended.
        given, named: arguments of `shoal.parallelize`, by place and by name.
        missing: as in `remove_new_folders`.

    Raises:
        ConfigError: in the error's place, if an optimizer stands in the place of another argument,
            or a module in that of the optimizer.
    """
    rename_error(error)
    remove_new_folders(missing)
    order = dict(zip(ORDER, given, strict=False)) | {n: named[n] for n in ORDER if n in named}
    swapped = any(isinstance(order.get(name), Optimizer) for name in ("model", "loss"))
    if swapped or isinstance(order.get("optimizer"), nn.Module):
        told = [f"{name} is {type(one).__name__}" for name, one in order.items() if one is not None]
        raise ConfigError(
            f"shoal.parallelize: {', '.join(told)}; try: shoal.parallelize({', '.join(ORDER)}), in "
            f"this order"
        ) from error


def remove_new_folders(missing: Sequence[Path]) -> None:
    """Remove the folder of a start that was refused, if it holds nothing but that start's files.

    The next start of the script then finds what this one found: nothing.

    Args:
        missing: the run folder and its parents, as far as they did not exist before the start.
    """
    with contextlib.suppress(OSError):  # another rank removes it too, or a parent has other files
        found = [*missing[0].rglob("*")] if missing else []
        files = [one for one in found if not one.is_dir()]
        if any(one.parent != missing[0] or not STARTED.fullmatch(one.name) for one in files):
            return
        for one in files:
            one.unlink(missing_ok=True)
        folders = sorted((one for one in found if one not in files), reverse=True)
        for one in (*folders, *missing):
            one.rmdir()
