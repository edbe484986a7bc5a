"""Health checks of one machine before a run, each with a suggested fix; without torch.

    clock       the wall clock against the monotonic clock and against file dates
    disk        free space, writes and fsync of a folder
    memory      free memory, within a container's limit · shared memory  space in /dev/shm
    files       limit of open files and sockets of a process
    ports       connections of this machine to itself; whether the requested port is free
    versions    of Python and of Shoal's dependencies, against the package's requirements
    cores       usable cores, and the load of other programs

A check takes the values that it judges as arguments, so that a test can simulate a faulty machine.
Links and sums need several processes: link_check.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.base.estimates.facts import usable_cores
from shoal.base.text.units import bytes_text, count_noun

LEAST_FREE_BYTES = 2**30
"""Room for two checkpoints of the first model and a cache of its text; else `--free-gib`."""
LEAST_RATE = 2**20
"""Bytes per second: at less a checkpoint of 1 GiB takes a quarter of an hour."""
PROBE_BYTES = 2**23
LEAST_SHARED_BYTES = 256 * 2**20
"""Loader workers pass whole batches through it; a container's default is 64 MiB."""
WORKER_BYTES = 512 * 2**20
"""Memory of a process that has imported torch and trains a small model."""
LEAST_FILES, FILES_PER_PROCESS = 1024, 32
CLOCK_WATCHED_S, CLOCK_STEP_S, CLOCK_FILE_S = 0.2, 0.02, 5.0
"""NTP slews by 0.5 ms a second, which is harmless; steps of a clock break runs. Files get a coarse
limit, since their dates come from coarse clocks or remote servers."""
ANSWER_S = 2.0
NEXT_PORTS = 200


@dataclass(frozen=True)
class CheckResult:
    """Result of one check.

    Attributes:
        check: its name.
        ok: whether the check passed.
        what: the finding, with its place and figures.
        mend: the nearest legal value, or a command to type; "" if the check passed.
        host: name of the machine, if several are checked.
    """

    check: str
    ok: bool
    what: str
    mend: str = ""
    host: str = ""

    def record(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return asdict(self)

    def line(self) -> str:
        """Return the result as a line: "ok" or "WRONG", check, host, finding, suggested fix."""
        where = f"{self.host}: " if self.host else ""
        mend = f"; {self.mend}" if self.mend else ""
        return f"{'ok   ' if self.ok else 'WRONG'} {self.check}: {where}{self.what}{mend}"


def check_machine(
    folder: Path, cache: Path, free_bytes: int, processes: int, port: int
) -> list[CheckResult]:
    """Run all checks of this machine that need no other process.

    Args:
        folder: parent of the run folders.
        free_bytes: free disk space that the folder should have.
        processes: processes that a run would start here.
        port: a port that should be free; 0: none.
    """
    place = nearest_existing(folder)
    return [
        check_clock(place),
        check_disk("disk", folder, free_bytes),
        check_disk("disk of the cache", cache, min(free_bytes, LEAST_FREE_BYTES)),
        check_disk("disk of TMPDIR", Path(tempfile.gettempdir()), 8 * PROBE_BYTES),
        check_memory(processes),
        check_shared_memory(),
        check_files(resource.getrlimit(resource.RLIMIT_NOFILE), processes),
        *check_ports(port),
        check_versions(*installed_versions()),
        check_cores(processes, os.getloadavg()[0]),
    ]


def check_clock(
    folder: Path,
    wall: Callable[[], float] = time.time,
    steady: Callable[[], float] = time.monotonic,
) -> CheckResult:
    """Check that the wall clock keeps pace with the monotonic clock and with file dates."""
    apart_s = _clock_difference_s(wall, steady)
    time.sleep(CLOCK_WATCHED_S)
    step_s = _clock_difference_s(wall, steady) - apart_s
    ahead_s = 0.0
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=folder) as probe:
        probe.write(b"now")
        probe.flush()
        ahead_s = wall() - os.stat(probe.name).st_mtime
    mend = "run one time service, and that alone (chronyc tracking, timedatectl)"
    if abs(step_s) > CLOCK_STEP_S:
        what = f"the wall clock moved by {step_s * 1e3:+.0f} ms in {CLOCK_WATCHED_S:g} s"
        return CheckResult("clock", False, f"{what} against the monotonic clock", mend)
    if abs(ahead_s) > CLOCK_FILE_S:
        what = f"the wall clock is {ahead_s:+.1f} s from the clock that dates files of {folder}"
        return CheckResult("clock", False, what, mend)
    what = f"wall and monotonic clock keep pace (within {abs(step_s) * 1e3:.2f} ms)"
    return CheckResult("clock", True, what)


def _clock_difference_s(wall: Callable[[], float], steady: Callable[[], float]) -> float:
    """Return wall minus monotonic time, from the quickest of nine readings."""
    tries = []
    for _ in range(9):
        before, now, after = steady(), wall(), steady()
        tries.append((after - before, now - (before + after) / 2))
    return min(tries)[1]


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    place = folder.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    return place


def check_disk(check: str, folder: Path, least_bytes: int) -> CheckResult:
    """Check a folder's free space, inodes, and the rate of writing and syncing a file."""
    place = nearest_existing(folder)
    told = f"{folder}" if place == folder.absolute() else f"{folder} (in {place})"
    where = "another run.folder=…" if check == "disk" else "SHOAL_CACHE=… or TMPDIR=… elsewhere"
    mend = f"make room, or {where}"
    left = os.statvfs(place)
    free_bytes = left.f_bavail * left.f_frsize
    if left.f_files and not left.f_favail:
        return CheckResult(check, False, f"{told} has no inode left", mend)
    if free_bytes < least_bytes:
        what = f"{told} has {bytes_text(free_bytes)} free, {bytes_text(least_bytes)} are needed"
        return CheckResult(check, False, what, mend)
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".shoal-doctor-") as probe:
            began_s = time.perf_counter()
            probe.write(os.urandom(PROBE_BYTES))  # random, since a drive may compress
            probe.flush()
            os.fsync(probe.fileno())
            rate = PROBE_BYTES / (time.perf_counter() - began_s)
    except OSError as failure:
        full = failure.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = failure.strerror or str(failure)
        other = mend if full else f"a folder that you may write to: {where}"
        return CheckResult(
            check, False, f"{told}: a file cannot be written and synced: {reason}", other
        )
    what = f"{told}: {bytes_text(free_bytes)} free, {bytes_text(rate)}/s written and synced"
    return CheckResult(check, rate >= LEAST_RATE, what, "" if rate >= LEAST_RATE else where)


def check_memory(
    processes: int,
    table: Path = Path("/proc/meminfo"),
    cgroup: Path = Path("/sys/fs/cgroup"),
) -> CheckResult:
    """Check that the processes fit in the free memory, within a container's limit."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", table.read_text(encoding="utf-8"))
    except OSError:
        found = None
    if found is None:
        return CheckResult("memory", True, f"not known here: {table} tells nothing")
    free_bytes, by = int(found[1]) * 1024, ""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            left = int((cgroup / limit).read_text(encoding="utf-8")) - int(
                (cgroup / used).read_text(encoding="utf-8")
            )
            if left < free_bytes:
                free_bytes, by = left, f" within the limit of {cgroup / limit}"
    needed = processes * WORKER_BYTES
    what = f"{bytes_text(free_bytes)} free{by}"
    if free_bytes >= needed:
        return CheckResult("memory", True, what)
    fit = max(0, free_bytes // WORKER_BYTES)
    takes = "take" if processes != 1 else "takes"
    who = count_noun(processes, "process", "processes")
    what += f", {who} with torch {takes} {bytes_text(needed)} before any model"
    return CheckResult(
        "memory", False, what, f"launch.processes={fit}" if fit else "end other programs"
    )


def check_shared_memory(folder: Path = Path("/dev/shm")) -> CheckResult:
    """Check that shared memory has room for the batches of loader workers."""
    if not folder.is_dir():
        return CheckResult("shared memory", True, f"{folder} does not exist on this system")
    disk = shutil.disk_usage(folder)
    what = f"{folder} has {bytes_text(disk.free)} free of {bytes_text(disk.total)}"
    if disk.free >= LEAST_SHARED_BYTES:
        return CheckResult("shared memory", True, what)
    mend = f"mount -o remount,size=1G {folder}; in a container: docker run --shm-size=1g"
    what += f", {bytes_text(LEAST_SHARED_BYTES)} are needed"
    return CheckResult("shared memory", False, what, mend)


def check_files(limits: tuple[int, int], processes: int) -> CheckResult:
    """Check the (soft, hard) limit of open files and sockets of a process."""
    soft, hard = (2**31 if one == resource.RLIM_INFINITY else one for one in limits)
    needed = max(LEAST_FILES, FILES_PER_PROCESS * processes)
    what = f"a process may have {soft} files and sockets open (ulimit -n)"
    if soft >= needed:
        return CheckResult("file limit", True, what)
    mend = f"ulimit -n {needed}"
    if hard < needed:
        mend += f", which the hard limit of {hard} forbids: raise nofile in limits.conf as root"
    return CheckResult("file limit", False, f"{what}, {needed} are needed", mend)


def check_ports(port: int = 0) -> list[CheckResult]:
    """Check that this machine can connect to itself, and that `port` is free (0: no port)."""
    told = []
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(ANSWER_S)
            address = server.getsockname()
            with socket.create_connection(address, ANSWER_S) as here, server.accept()[0] as there:
                here.sendall(b"shoal")
                there.settimeout(ANSWER_S)
                if there.recv(5) != b"shoal":
                    raise OSError("what was sent did not arrive")
        told.append(CheckResult("ports", True, "127.0.0.1 answers itself"))
    except OSError as failure:
        what = f"a connection of 127.0.0.1 to itself fails: {failure}"
        told.append(
            CheckResult("ports", False, what, "ip link set lo up; look at the firewall's rules")
        )
    if port:
        told.append(_check_port(port))
    return told


def _check_port(port: int) -> CheckResult:
    try:
        _bind(port)
    except OSError as failure:
        free = next(
            (p for p in range(port + 1, min(port + NEXT_PORTS, 65536)) if _is_port_free(p)), None
        )
        mend = f"nearest free: {free}" if free else "choose another"
        reason = failure.strerror or str(failure)
        return CheckResult("ports", False, f"port {port} cannot be listened at: {reason}", mend)
    return CheckResult("ports", True, f"port {port} is free")


def _bind(port: int) -> None:
    # Binds as torch's TCPStore does: at all addresses, with SO_REUSEADDR.
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tried.bind(("", port))
        tried.listen(1)


def _is_port_free(port: int) -> bool:
    try:
        _bind(port)
    except OSError:
        return False
    return True


def installed_versions() -> tuple[dict[str, str | None], list[str]]:
    """Return the installed version of each dependency (None: missing), and the requirements."""
    import platform
    from importlib import metadata

    try:
        own = metadata.metadata("shoal")
    except metadata.PackageNotFoundError:
        return {"python": platform.python_version()}, []
    asked = [f"python{own['Requires-Python']}"] if own["Requires-Python"] else []
    asked += [one for one in own.get_all("Requires-Dist") or [] if "extra ==" not in one]
    found: dict[str, str | None] = {"python": platform.python_version()}
    for one in asked[1:]:
        name = _name(one)
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found, asked


def check_versions(installed: Mapping[str, str | None], asked: Sequence[str]) -> CheckResult:
    """Check installed versions against requirements such as "torch<2.14,>=2.11".

    >>> check_versions({"torch": "2.9.1"}, ["torch<2.14,>=2.11"]).line()
    "WRONG versions: torch 2.9.1, >=2.11 is needed; pip install 'torch<2.14,>=2.11'"
    """
    wrong, mend = [], []
    for one in asked:
        name = _name(one)
        have = installed.get(name)
        for sign, limit in re.findall(r"(>=|<=|==|<|>)\s*([0-9][0-9.]*)", one):
            if have is None or not _satisfies(have, sign, limit):
                wrong.append(f"{name} {have or 'is missing'}, {sign}{limit} is needed")
                mend.append(one.split(";")[0].strip().replace(" ", ""))
                break
    told = " ".join(f"{name} {version}" for name, version in installed.items())
    if wrong:
        return CheckResult("versions", False, "; ".join(wrong), _install(mend))
    unknown = "" if asked else " (Shoal is not installed here, so what it needs is not known)"
    return CheckResult("versions", True, told + unknown)


def _install(asked: Sequence[str]) -> str:
    packages = [f"'{one}'" for one in asked if not one.startswith("python")]
    python = [f"another Python: {one}" for one in asked if one.startswith("python")]
    return "; ".join(python + ([f"pip install {' '.join(packages)}"] if packages else []))


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~;\s\[(]", requirement)[0].lower()


def _satisfies(have: str, sign: str, limit: str) -> bool:
    numbers = [int(n) for n in re.findall(r"\d+", have.split("+")[0])[:3]]
    least = [int(n) for n in limit.strip(".").split(".")]
    width = max(len(numbers), len(least))
    a, b = ([*one, *[0] * (width - len(one))] for one in (numbers, least))
    return {">=": a >= b, "<=": a <= b, "==": a == b, "<": a < b, ">": a > b}[sign]


def check_cores(processes: int, load: float, cores: int | None = None) -> CheckResult:
    """Check that every process has its own core; report the load of other programs."""
    cores = usable_cores() if cores is None else cores
    what = f"{cores} usable, load {load:.1f}"
    if load > cores:
        what += ": other programs want them, and steps will take longer than they could"
    if processes <= cores:
        return CheckResult("cores", True, what)
    what = f"{processes} processes on {cores} usable core{'s' * (cores != 1)}"
    return CheckResult("cores", False, what, f"launch.processes={cores}")
