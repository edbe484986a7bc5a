"""Stack dumps of a rank's threads, made by a thread when the rank's watch page requests them.

No signal is involved, since it would interrupt a user's C call. The thread polls for requests five
times a second (`watch_page.py`). A process whose C code holds the GIL does not answer, which
identifies it. The thread also ends the process when the watchdog has found a deadlock among the
ranks.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.base.standard_streams import flush_streams
from shoal.base.text.user_frames import OWN_FOLDER, user_line_of_frame
from shoal.wire.phases import write_phases_to_folder
from shoal.wire.watch_page import WatchPage, attach_page

LOOK_S = 0.2
NAME = "shoal-stacks"
_WRAPPERS = ("wrapper", "__call__", "inner")


def start_worker_reports(folder: Path) -> None:
    """Report this process's activity to the launcher's watch page, and by rank 0 in its folder."""
    start_page_reports()
    if os.environ.get("RANK", "0") == "0":
        write_phases_to_folder(folder)


def start_page_reports() -> None:
    """Report this process's activity to the watch page of the launcher, if there is one."""
    if page := WatchPage.open():
        attach_page(page)
        start_stack_thread(page)


_OF_RUNS = tuple(f"{OWN_FOLDER}/{room}/" for room in ("trainer", "data", "checkpoint"))


def start_stack_thread(page: WatchPage) -> None:
    """Start the thread that answers stack requests; it ends with the process."""
    main = threading.main_thread().ident or 0
    threading.Thread(target=_answer, args=(page, main), name=NAME, daemon=True).start()


def _answer(page: WatchPage, main: int) -> None:
    answered = page.stack_request
    while not page.is_closed:
        time.sleep(LOOK_S)
        if (order := page.exit_order) is not None:
            _end(page, *order)
        if (asked := page.stack_request) != answered:
            page.answer(asked, {**page.told, **dump_stacks(main)})
            answered = asked


def _end(page: WatchPage, status: int, at_s: float) -> None:
    """End this process, whose main thread hangs in a collective.

    All ranks end together: a rank that loses its peer first would print an error of its collective.
    """
    sys.excepthook = lambda *_: time.sleep(5.0)  # it has lost a peer; let this thread exit first
    time.sleep(max(0.0, at_s - time.monotonic()))
    page.close()
    flush_streams()
    os._exit(status)


def dump_stacks(main: int) -> dict[str, Any]:
    """Return the position and the stacks of this process's threads.

    Args:
        main: the thread that trains.

    Returns:
        of the training thread: `place`, the user's line; `collective` in which it waits; `by_user`,
        whether the user called it; `own`, whether Shoal's code runs; `compiling`; `between`,
        whether it is in no call of a run or of its loader. `dump_stacks` is the text of all stacks,
        training thread first.
    """
    frames = sys._current_frames()
    names = {one.ident: one.name for one in threading.enumerate()}
    order = [main, *(one for one in frames if one != main)]
    text = [
        f"thread {names.get(one, one)}:\n{''.join(traceback.format_stack(frames[one]))}"
        for one in order
        if one in frames and names.get(one) != NAME
    ]
    frame = frames.get(main)
    collective, by_user = find_blocking_collective(frame)
    told = {
        "place": user_line_of_frame(frame),
        "collective": collective,
        "by_user": by_user,
        "own": runs_own_code(frame),
        "between": not is_inside_run_call(frame),
        "compiling": _compiles(frame),
        "stacks": "\n".join(text),
    }
    del frames, frame
    return told


def find_blocking_collective(frame: FrameType | None) -> tuple[str, bool]:
    """Return the collective in which a thread stands, from its innermost frames; "" for none.

    The second value is whether a user's line called it.
    """
    found, inside = "", False
    while frame is not None and frame.f_code.co_filename.endswith("/torch/_ops.py"):
        frame = frame.f_back
    while frame is not None and _talks(frame):
        if frame.f_code.co_name not in _WRAPPERS:
            found = frame.f_code.co_name
        frame, inside = frame.f_back, True
    if not inside:
        return "", False
    file = frame.f_code.co_filename if frame is not None else OWN_FOLDER
    return found or "a collective", "/torch/" not in file and not file.startswith(OWN_FOLDER)


def runs_own_code(frame: FrameType | None) -> bool:
    """Return whether a thread's innermost frame outside of torch belongs to Shoal."""
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(f"{OWN_FOLDER}/")


def is_inside_run_call(frame: FrameType | None) -> bool:
    """Return whether a thread is inside a call of a run or its loader."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OF_RUNS):
            return True
        frame = frame.f_back
    return False


def _talks(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(f"{OWN_FOLDER}/fabric/") or "/torch/distributed/" in file


def _compiles(frame: FrameType | None) -> bool:
    # Compiled code itself runs below other frames of this package.
    while frame is not None:
        if frame.f_code.co_name == "_compile" and "/torch/_dynamo/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
