"""Wrapper of a worker's main function that records its failure in its own words.

A failure becomes one JSON file, `logs/rank-K.error.json`, which the supervisor reads: `kind`,
`line`, `traceback`, `exit_code`, `time_s`. Exit codes: 0 done · 1 a crash, worth a restart ·
2 the user must change something · 3 the numbers are at fault (a restart would repeat them).
Source: the idea of an error file per worker is torchelastic's `@record`.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from shoal.base.errors import ShoalError
from shoal.base.runlog.events import EventLog
from shoal.base.runlog.folder_owner import FolderOwner
from shoal.base.standard_streams import flush_streams, write_error
from shoal.base.text.user_frames import user_line
from shoal.launch.worker_failures import ErrorReport, write_report
from shoal.wire import phases

TRACEBACK_LINES = 25
LINE_LETTERS = 400
CRASH_CODE = 1


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Run a worker's program by `run_worker`, and end this process with its status.

    After a failure the process group cannot be destroyed in order, since peers may be gone. The
    interpreter's own teardown may then abort in gloo's threads and hide the status.
    """
    code = run_worker(main)
    if phases.page is not None:
        phases.page.close()  # a process that ends without it was not done
    flush_streams()
    os._exit(code)


def run_worker(main: Callable[[], int]) -> int:
    """Run `main` and return the exit code of this process; write a report of a failure first.

    The report goes to the run folder named by SHOAL_RUN_FOLDER (set by the supervisor), and always
    to standard error, which is this rank's log. Notes of a ShoalError hold the traceback of the
    user's own code and stand before its line. Call it last in a process.
    """
    given = os.environ.get("SHOAL_RUN_FOLDER", "")
    owner = FolderOwner(Path(given))
    owner.record_with_owner()
    try:
        return main()
    except ShoalError as failure:
        line, notes = str(failure), [note.rstrip() for note in getattr(failure, "__notes__", ())]
        words = "\n".join([*notes, line])
        trace = _keep_last_lines(words) if notes else ""
        report = ErrorReport.of(failure, exit_code=failure.exit_code, line=line, trace=trace)
    except (Exception, SystemExit) as failure:  # a user's sys.exit() is no end of the run
        place = user_line(failure.__traceback__)
        told = _shorten_message("".join(traceback.format_exception_only(failure)))
        line = f"{place}: {told}" if place else told
        words = _format_traceback(failure)
        report = ErrorReport.of(
            failure, exit_code=CRASH_CODE, line=line, trace=_keep_last_lines(words)
        )
    write_error(words)
    if folder := os.environ.get("SHOAL_RUN_FOLDER"):  # torchrun's workers set it themselves
        rank = int(os.environ.get("RANK", "0"))
        here = owner.current_path() if folder == given else Path(folder)
        write_report(here / "logs" / f"rank-{rank}.error.json", report)
        if "SHOAL_STORE" not in os.environ and not report.lost_peer:  # no supervisor reports it
            how, words = f"exit code {report.exit_code}", report.traceback or report.line
            log = EventLog(here / "events.jsonl", rank)
            log.emit("worker_died", pid=os.getpid(), how=how, traceback=words)
    return report.exit_code


def _shorten_message(text: str) -> str:
    r"""Return the first lines of an error message as one line: Dynamo's and CUDA's fill a screen.

    >>> _shorten_message("ValueError: a\n  b\n\nmore")
    'ValueError: a b'
    """
    told = " ".join(text.strip().split("\n\n")[0].split())
    return told if len(told) <= LINE_LETTERS else f"{told[:LINE_LETTERS]}…"


def _format_traceback(failure: BaseException) -> str:
    found = traceback.TracebackException.from_exception(failure)
    link: traceback.TracebackException | None = found
    while link is not None:
        kept = [frame for frame in link.stack if not _is_internal_frame(frame)]
        link.stack = traceback.StackSummary.from_list(kept)
        link = link.__cause__ or link.__context__
    lines = "".join(found.format()).rstrip().splitlines()
    # Marks under the code are a third of the lines, and repeat the line.
    return "\n".join(line for line in lines if line.strip("^~ "))


def _keep_last_lines(text: str) -> str:
    lines = text.splitlines()
    cut = len(lines) - TRACEBACK_LINES
    if cut <= 0:
        return "\n".join(lines)
    return "\n".join([f"({cut} lines above are in the log)", *lines[cut:]])


def _is_internal_frame(frame: traceback.FrameSummary) -> bool:
    own = os.path.abspath(frame.filename) == os.path.abspath(__file__)
    # torch.nn.Module.__call__ puts two such frames between every two of the user's.
    module_call = frame.name in ("_wrapped_call_impl", "_call_impl")
    return own or module_call
