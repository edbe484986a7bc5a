"""The Dockerfile, without Docker: its lines are carried out in a bare Debian, by chroot.

Needs root, debootstrap and a Debian mirror; the base image's Python is Debian's own here.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.proof
ROOT = Path(__file__).resolve().parents[3]
RELEASE = {(3, 11): "bookworm", (3, 13): "trixie"}
MIRROR = "http://deb.debian.org/debian"


def ran(*command: str, limit_s: float = 900, **environ: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limit_s, check=False,
        env={**os.environ, **environ},
    )  # fmt: skip
    assert done.returncode == 0, (
        f"{shlex.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    )
    return done.stdout


def instructions() -> list[tuple[str, str]]:
    """(word, rest) of every instruction."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    return [
        (line.split(" ", 1)[0], line.split(" ", 1)[1])
        for line in lines
        if line and not line.startswith("#")
    ]


@pytest.fixture
def debian(tmp_path: Path) -> Iterator[Path]:
    """A bare Debian with Python and pip, and the wheels of what Shoal needs."""
    release = RELEASE.get(sys.version_info[:2])
    if os.geteuid() or not shutil.which("debootstrap") or release is None:
        pytest.skip("needs root, debootstrap and a Debian whose Python is this one's version")
    root = tmp_path / "root"
    include = "python3,python3-pip,ca-certificates"
    ran("debootstrap", "--variant=minbase", f"--include={include}", release, str(root), MIRROR)
    for name in ("resolv.conf", "hosts"):
        shutil.copy(f"/etc/{name}", root / "etc" / name)
    wheels = root / "wheels"
    constraints = str(ROOT / "constraints.txt")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    ran(*pip, "wheel", "-q", "-c", constraints, "-w", str(wheels), str(ROOT), "setuptools")
    for built in wheels.glob("shoal-*"):
        built.unlink()  # the image makes its own
    mounts = [
        (root / name, ("-t", kind, kind)) for name, kind in (("proc", "proc"), ("sys", "sysfs"))
    ]
    mounts.append((root / "dev", ("--rbind", "/dev")))
    for place, how in mounts:
        ran("mount", *how, str(place))
    try:
        yield root
    finally:
        for place, _ in reversed(mounts):
            ran("umount", "-l", str(place))


def test_the_image_trains(debian: Path) -> None:
    def inside(command: str, user: str = "root", folder: str = "/") -> str:
        pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheels", "PIP_BREAK_SYSTEM_PACKAGES": "1"}
        words = ("chroot", "--userspec", user, str(debian), "sh", "-c", f"cd {folder} && {command}")
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return ran(*words, **pip, PATH=path, HOME=f"/home/{user}" if user != "root" else "/root")

    user, folder, entry = "root", "/", ""
    for word, rest in instructions():
        if word == "RUN":
            inside(rest, user, folder)
        elif word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                place = debian / target.lstrip("/")
                if (ROOT / source).is_dir():
                    shutil.copytree(
                        ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__")
                    )
                else:
                    place.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / source, place)
        elif word == "USER":
            user = rest
        elif word == "WORKDIR":
            folder = rest
            (debian / rest.lstrip("/")).mkdir(exist_ok=True)
        elif word == "ENTRYPOINT":
            entry = shlex.join(re.findall(r'"([^"]*)"', rest))
        else:
            assert word == "FROM", word
    # The folder is mounted from outside, and is the user's own there.
    shutil.chown(debian / folder.lstrip("/"), 1000, 1000)
    small = "data.source=synthetic model.dim=32 model.layers=2 model.heads=2 train.batch=16"
    told = inside(f"{entry} train {small} train.steps=4 launch.processes=2", user, folder)
    assert "step=4" in told or "step 4" in told, told
    assert inside("g++ --version", user).startswith("g++")
