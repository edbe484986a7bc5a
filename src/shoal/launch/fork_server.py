"""Fork server: import torch once and fork every worker of a run, at each of its starts.

An import of torch and of the training code takes five CPU seconds. Workers that are started as
programs spend them once each and again after every restart; forked workers share one import, and
its memory. Two sides, one channel of messages (a SOCK_SEQPACKET pair of sockets):

    supervisor (`processes.ForkServer`)            the server (this program), which imports first
                                               ←   {"ready": true} | {"cannot": reason}
    {"command", "environ"}, two open files     →   forks; the files are its log, what it waits for
                                               ←   {"pid": n} | {"cannot": reason}
    a byte in the second file: n is guarded    →   the worker begins
                                               ←   {"ended": n, "code": c}, its group killed before
    {"serve": true}, one end of a channel      →   forks itself: the fork serves that channel alone
    (on that channel)                          ←   {"ready": true, "pid": n} | {"cannot": reason}

A fork of the server is for another supervisor, as of each island of one machine. It ends when its
channel is closed, and with the server. A worker sees what it would as a program: its module is
`__main__`, it leads its own session, and dies with the server as that dies with the supervisor. All
forks would share the files that a device driver opened, and CUDA's cannot be shared. So a server
whose imports opened a device reports that and forks nothing; workers are then started as programs,
as they are on systems other than Linux.

Source: multiprocessing's forkserver; that one neither redirects output nor ends process groups.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from shoal.base.standard_streams import flush_streams
from shoal.launch.processes import MESSAGE_BYTES, make_parent_death_hook
from shoal.wire.phases import phase, set_phase_listener, write_phases_to_folder

PR_SET_NAME = 15
TO_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that a scheduler, or a terminal, sends to every process of a job."""
KIND = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/davinci")
"""Files that a driver holds open in a process that has initialised a device."""


def main() -> None:
    """Run the server: import, then fork on each request."""
    for number in TO_ALL:  # a signal for the run must not end the server: the workers die with it
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=int(sys.argv[1]))
    write_phases_to_folder(Path(sys.argv[3]))
    with phase("import"):
        for name in sys.argv[2].split(","):
            importlib.import_module(name)
    set_phase_listener(None)
    if reason := _device_refusal():
        _send_message(channel, cannot=reason)
        return
    gc.collect()
    gc.freeze()  # a collection in a fork would write to every page that it shares
    _send_message(channel, ready=True)
    _serve(channel)


def _serve(channel: socket.socket) -> None:
    """Process requests and ends of workers until the supervisor is gone."""
    with selectors.DefaultSelector() as wakes:
        wakes.register(channel, selectors.EVENT_READ)
        while True:
            for key, _ in wakes.select():
                if key.data is not None:
                    _reap_worker(channel, wakes, key.fd, key.data)
                elif not _serve_request(channel, wakes):
                    return


def _device_refusal() -> str:
    """Return the reason why a fork of this process could not use its devices; "" if it could."""
    found = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(entry.path))
    held = [name for name in found if name.startswith(DEVICES)]
    return f"an import opened {held[0]}" if held else ""


def _serve_request(channel: socket.socket, wakes: selectors.BaseSelector) -> bool:
    """Process one request; return False if the supervisor is gone."""
    told, files, *_ = socket.recv_fds(channel, MESSAGE_BYTES, 2)
    if not told:
        return False
    request = json.loads(told)
    serves = "serve" in request
    placed, begun = os.pipe()
    server = os.getpid()
    try:
        pid = os.fork()
    except OSError as failure:
        _send_message(socket.fromfd(files[0], *KIND) if serves else channel, cannot=str(failure))
        pid = -1
    if pid == 0:
        for file in [key.fd for key in wakes.get_map().values()]:
            os.close(file)
        wakes.close()
        os.close(placed)
        if serves:
            _run_as_server(files[0], begun, server)
        _run_as_worker(request, files, begun, server)
    os.close(begun)
    if pid > 0:
        os.read(placed, 1)  # ends when the fork leads its own group and can be killed by it
        wakes.register(os.pidfd_open(pid), selectors.EVENT_READ, data=pid)
        if not serves:
            _send_message(channel, pid=pid)
    for file in (placed, *files):
        os.close(file)
    return True


def _reap_worker(
    channel: socket.socket, wakes: selectors.BaseSelector, file: int, pid: int
) -> None:
    """Kill the process group of an ended worker, and report the worker's exit code."""
    wakes.unregister(file)
    os.close(file)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # before the kernel can reuse its number
    _, status = os.waitpid(pid, 0)
    _send_message(channel, ended=pid, code=os.waitstatus_to_exitcode(status))


def _run_as_server(file: int, begun: int, parent: int) -> NoReturn:
    """Serve another channel, to the end of the process."""
    code = 1
    try:
        os.setsid()
        if arrange := make_parent_death_hook(parent):
            arrange()
        os.close(begun)
        channel = socket.socket(*KIND, fileno=file)
        _send_message(channel, ready=True, pid=os.getpid())
        _serve(channel)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        flush_streams()
        os._exit(code)


def _run_as_worker(
    request: dict[str, Any], files: Sequence[int], begun: int, server: int
) -> NoReturn:
    """Run as the worker, as `python -m MODULE ARGUMENT…` would, to the end of the process."""
    code = 1
    try:
        os.setsid()
        for number in TO_ALL:
            signal.signal(number, signal.SIG_DFL)
        if arrange := make_parent_death_hook(server):
            arrange()
        os.dup2(files[0], 1)
        os.dup2(files[0], 2)
        os.close(begun)
        if not os.read(files[1], 1):
            os._exit(1)  # the supervisor died before this process was guarded
        for file in files:
            os.close(file)
        os.environ.update(request["environ"])
        name = f"shoal rank {os.environ['RANK']}"
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()  # else every worker, and every restart, would draw the same numbers
        sys.argv = request["command"]
        runpy.run_module(request["command"][0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        flush_streams()
        os._exit(code)


def _send_message(channel: socket.socket, **message: object) -> None:
    with contextlib.suppress(OSError):  # a supervisor that is gone ends the server by a signal
        channel.send(json.dumps(message).encode())


if __name__ == "__main__":
    main()
