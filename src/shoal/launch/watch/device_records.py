"""Records of the devices of a machine: `devices.jsonl`, a line per host every 10 seconds.

    {"time_s": 1764400000.0, "host": "a", "devices": [{"index": 0, "name": "NVIDIA H100",
     "utilisation": 0.97, "memory_used_bytes": 6979321856, "memory_total_bytes": 85520809984,
     "power_w": 612.3, "temperature_c": 61.0}, …]}

The numbers are those of `nvidia-smi`, where that program is; a field that it does not know (`[N/A]`
of a device in MIG mode, say) is null. The watch starts the program as a child and polls it without
waiting: a child that takes longer than `LIMIT_S`, or that prints something else, is killed and
counts as failed, and the next one starts later. A child that does not die, as one that waits for a
broken driver, is left alone, and no other is started beside it.

Source   nvidia-smi(1), `--query-gpu`, `--format=csv,noheader,nounits`
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from shoal.base.runlog.events import append_line
from shoal.base.runlog.folder_owner import FolderOwner
from shoal.base.runlog.thin_lines import thin_lines
from shoal.base.text.event_sentences import strip_control_characters

DEVICES_FILE, PROGRAM = "devices.jsonl", "nvidia-smi"
FIELDS = (
    "index", "name", "utilization.gpu", "memory.used", "memory.total", "power.draw",
    "temperature.gpu",
)  # fmt: skip
EVERY_S, LIMIT_S, AFTER_FAILURE_S = 10.0, 5.0, 60.0
"""Seconds between two samples · that a child may take · until the next one after a failure."""
MOST_BYTES, MOST_DEVICES, MOST_NAME = 1 << 16, 64, 80
"""Of a child's output · devices in a line · letters of a device's name."""
MIB = 1 << 20
FILE_BYTES = 16 << 20
"""Size above which older lines are thinned out."""

Device = dict[str, Any]


def parse_devices(text: str) -> list[Device]:
    r"""Parse the output of nvidia-smi for `FIELDS`; lines of another form are left out.

    >>> found = parse_devices("0, NVIDIA H100, 97, 100, 81559, [N/A], 61\noops\n")
    >>> found[0]["utilisation"], found[0]["power_w"], found[0]["memory_used_bytes"], len(found)
    (0.97, None, 104857600, 1)
    """
    found = []
    for line in text.splitlines()[:MOST_DEVICES]:
        parts = [part.strip() for part in line.split(",")]
        index, numbers = parts[0], parts[-5:]
        if len(parts) < len(FIELDS) or not (index.isascii() and index.isdigit()):
            continue
        share, used, total, power_w, temperature_c = map(_parse_number, numbers)
        if share is not None:
            share = share / 100 if share <= 100 else None
        device = {
            "index": int(index[:6]),
            "name": strip_control_characters(", ".join(parts[1:-5]))[:MOST_NAME],
            "utilisation": share,
            "memory_used_bytes": None if used is None else int(used * MIB),
            "memory_total_bytes": None if total is None else int(total * MIB),
            "power_w": power_w,
            "temperature_c": temperature_c,
        }
        found.append(device)
    return found


def _parse_number(text: str) -> float | None:
    """Return a number that is finite and not negative; None for `[N/A]` and the like."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and 0 <= number < 1e12 else None


class DeviceSampler:
    """Sampler of this machine's devices by a child process, which `poll` never waits for.

    Args:
        every_s, limit_s, after_failure_s: as `EVERY_S`, `LIMIT_S`, `AFTER_FAILURE_S`.
    """

    def __init__(
        self,
        every_s: float = EVERY_S,
        limit_s: float = LIMIT_S,
        after_failure_s: float = AFTER_FAILURE_S,
    ) -> None:
        self.every_s, self.limit_s, self.after_failure_s = every_s, limit_s, after_failure_s
        self.path = shutil.which(PROGRAM)
        self._child: subprocess.Popen[bytes] | None = None
        self._output = b""
        self._next_s, self._until_s, self._is_killed = -math.inf, 0.0, False

    def poll(self) -> list[Device] | None:
        """Start a child if it is time; return the devices if one has just ended well."""
        if self.path is None:
            return None
        now_s = time.monotonic()
        if self._child is None:
            if now_s >= self._next_s:
                self._start(self.path, now_s)
            return None
        self._read()
        if self._child.poll() is None:
            if now_s > self._until_s or len(self._output) > MOST_BYTES:
                self._kill()
            return None
        self._read()
        devices = parse_devices(self._output.decode("utf-8", "replace"))
        is_sound = self._child.returncode == 0 and not self._is_killed and bool(devices)
        self._forget()
        if not is_sound:
            self._next_s = now_s + self.after_failure_s
            return None
        return devices

    def close(self) -> None:
        """Kill the child, if one is running."""
        if self._child is not None:
            self._kill()
            self._child.poll()
            self._forget()

    def _start(self, path: str, now_s: float) -> None:
        self._next_s, self._until_s = now_s + self.every_s, now_s + self.limit_s
        query = f"--query-gpu={','.join(FIELDS)}"
        try:
            self._child = child = subprocess.Popen(
                [path, query, "--format=csv,noheader,nounits"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the ranks
                env={**os.environ, "LC_ALL": "C"},
            )
        except OSError:  # not executable, or no process or file left
            self._next_s = now_s + self.after_failure_s
            return
        if child.stdout is not None:
            os.set_blocking(child.stdout.fileno(), False)

    def _read(self) -> None:
        """Read what the child has printed so far, of too much only the beginning."""
        if self._child is not None and self._child.stdout is not None:
            with contextlib.suppress(OSError, ValueError):  # nothing there yet
                while len(self._output) <= MOST_BYTES:
                    block = os.read(self._child.stdout.fileno(), MOST_BYTES)
                    if not block:
                        return
                    self._output += block

    def _kill(self) -> None:
        self._is_killed = True
        if self._child is not None:
            with contextlib.suppress(OSError):  # its own children too, which hold the pipe
                os.killpg(self._child.pid, 9)

    def _forget(self) -> None:
        if self._child is not None and self._child.stdout is not None:
            self._child.stdout.close()
        self._child, self._output, self._is_killed = None, b"", False


class DeviceRecordFile:
    """File of the devices of all machines of a run, written where the run folder is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._owner = folder, FolderOwner(folder)
        self._is_begun = False

    def append_sample(self, host: str, devices: list[Device]) -> None:
        """Append a line; a full disk must not stop the run."""
        if not self.folder.is_dir():
            return
        with contextlib.suppress(OSError):
            path = self._owner.current_path() / DEVICES_FILE
            if not self._is_begun:
                _end_last_line(path)
                self._is_begun = True
            append_line(path, {"time_s": time.time(), "host": host, "devices": devices})
            thin_lines(path, FILE_BYTES, "host")


def _end_last_line(path: Path) -> None:
    """Append a line break if a crash left half a line, which would spoil the next one."""
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
