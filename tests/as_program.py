"""What a fork of `forks.py` runs: a program in its folder, which begins and ends as by itself.

as_program.py ASKED OUTPUT     ASKED: a JSON file with `cwd` and the `words` after `python`; OUTPUT: a
                               file, or "" where output goes with errors

What the program starts of Shoal's own, workers and the process that forks them, is forked in turn: it
would import what is here already. So is what an agent of torchrun starts, `python -u …` or the script
`shoal`.

SHOAL_TEST_NODE in its environment makes the program a node: a JSON object with `net`, the file of a
network namespace, `host`, a name of its own, and `mounts`, what stands where for it alone.

SHOAL_TEST_EXIT=1 ends it as the interpreter ends, where that end is what a test looks at.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
MS_BIND, MS_PRIVATE_ALL = 0x1000, 0x4000 | 0x40000
PATH = list(sys.path)
AGENT = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"


def main(asked: str, out: str) -> NoReturn:
    """Be the program."""
    told = json.loads(Path(asked).read_text())
    if out:
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
    for name in [name for name, text in os.environ.items() if not text]:
        del os.environ[name]  # the server wants a RANK; "" says that there is none
    os.chdir(told["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if node := os.environ.pop("SHOAL_TEST_NODE", ""):
        enter(**json.loads(node))
    subprocess.Popen = Ours  # type: ignore[misc]  # a class in a class's place
    if agent := sys.modules.get(AGENT):  # it took the class by name
        agent.Popen = Ours  # type: ignore[attr-defined]
    if "torch.distributed.run" in told["words"]:
        name_callers_fast()
    run_to_the_end(told["words"])


def name_callers_fast() -> None:
    """Give the agent of torchrun a name of its caller that reads no source of three thousand modules."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    def name(depth: int = 2) -> str:
        return sys._getframe(depth).f_code.co_name

    dynamic_rendezvous.get_method_name = name


def run_to_the_end(words: list[str]) -> NoReturn:
    """Run what `python WORD …` runs, and end as that ends."""
    as_interpreter = bool(os.environ.pop("SHOAL_TEST_EXIT", ""))
    code = 1
    try:
        if first := os.environ.pop("SHOAL_TEST_FIRST", ""):  # a module that changes the process
            importlib.import_module(first)
        be(words)
        code = 0
    except SystemExit as ended:
        code = status(ended)
    except BaseException as failure:
        code = uncaught(failure)
    if as_interpreter:
        ctypes.pythonapi.Py_Exit(code)
    with contextlib.suppress(Exception):
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    # Functions of `atexit` from before the fork did not run: reports end in a status here.
    if "simulated_cuda" in sys.modules:
        sys.modules["simulated_cuda"]._verdict()
    os._exit(code)


def enter(net: str = "", host: str = "", mounts: Mapping[str, str] | None = None) -> None:
    """Become a process of a node.

    Args:
        net: the file of its network namespace.
        host: its name.
        mounts: by path, the file or folder that it sees there.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def succeed(code: int) -> None:
        if code:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    if net:
        with open(net) as namespace:
            succeed(libc.setns(namespace.fileno(), CLONE_NEWNET))
    if host:
        succeed(libc.unshare(CLONE_NEWUTS))
        socket.sethostname(host)
    if mounts:
        succeed(libc.unshare(CLONE_NEWNS))
        succeed(libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_PRIVATE_ALL), None))
        for path, own in mounts.items():
            bind = ctypes.c_ulong(MS_BIND)
            succeed(libc.mount(own.encode(), path.encode(), None, bind, None))


def be(words: list[str]) -> None:
    """Run what `python WORD …` runs."""
    how, *rest = words
    if how == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    else:
        sys.path.insert(0, str(Path(how).resolve().parent))
        sys.argv = words
        runpy.run_path(how, run_name="__main__")


def status(ended: SystemExit) -> int:
    """The status that Python gives, after the words that it says."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    sys.stderr.write(f"{ended.code}\n")
    return 1


def uncaught(failure: BaseException) -> int:
    """Tell an exception to the hook that is in place; the status."""
    trace = failure.__traceback__
    while trace and trace.tb_frame.f_code.co_filename in (
        __file__,
        runpy.__file__,
        "<frozen runpy>",
    ):
        trace = trace.tb_next
    try:
        sys.excepthook(type(failure), failure, trace)
    except SystemExit as ended:
        return status(ended)
    return 130 if isinstance(failure, KeyboardInterrupt) else 1


class Ours(subprocess.Popen):
    """A process; a fork, where Shoal's supervisor starts a module of Shoal's, or torchrun a rank."""

    def __init__(self, args: Any, **settings: Any) -> None:
        words = list(args)
        ours = words[1:2] == ["-m"] and words[2].startswith("shoal.")
        ours = ours and "preexec_fn" in settings
        rank = words[1:2] == ["-u"] or Path(words[0]).name == "shoal"
        rank = rank and settings.keys() == {"env", "stdout", "stderr", "start_new_session"}
        self.forked = ours or rank
        if not self.forked:
            super().__init__(args, **settings)
            return
        self.args, self.returncode = args, None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            (serve if ours else be_rank)(words, **settings)

    def poll(self) -> int | None:
        """Its status once it has ended."""
        if self.forked and self.returncode is None:
            ended, how = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(how) if ended else None
        return self.returncode if self.forked else super().poll()

    def wait(self, timeout: float | None = None) -> int:
        """Its status; subprocess.TimeoutExpired where it does not end."""
        if not self.forked:
            return super().wait(timeout)
        until_s = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Send one if it runs."""
        if not self.forked:
            super().send_signal(sig)
        elif self.poll() is None:
            os.kill(self.pid, sig)


def serve(
    words: list[str], *, env: Any, stdout: Any, preexec_fn: Any, pass_fds: Any = (), **_: Any
) -> NoReturn:
    """Be that module's process: what `subprocess` and Python would make of it."""
    code = 1
    try:
        os.setsid()
        preexec_fn()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout.fileno(), 1)
        os.dup2(1, 2)
        for file in map(int, os.listdir("/proc/self/fd")):
            if file > 2 and file not in pass_fds:
                with contextlib.suppress(OSError):
                    os.close(file)
        os.environ.clear()
        os.environ.update(env)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        sys.modules.pop(words[2], None)  # runpy would warn of one that is here and is to run
        sys.argv = words[2:]
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = status(ended)
    except BaseException as failure:
        code = uncaught(failure)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def be_rank(
    words: list[str], *, env: Mapping[str, str], stdout: Any, stderr: Any, start_new_session: bool
) -> NoReturn:
    """Be what torchrun's agent starts: a rank's program, which inherits nothing but its output."""
    os.setsid()
    for number, file in ((1, stdout), (2, stderr)):
        if file is not None:
            os.dup2(file.fileno(), number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2:
            with contextlib.suppress(OSError):
                os.close(number)
    os.environ.clear()
    os.environ.update(env)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    sys.path[:] = PATH
    run_to_the_end(words[2:] if words[1:2] == ["-u"] else words)


if __name__ == "__main__":
    main(*sys.argv[1:])
