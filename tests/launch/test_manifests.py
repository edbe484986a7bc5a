"""Manifests are valid for three versions of Kubernetes, for JobSet and for Kubeflow's Trainer."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import shoal

HERE = Path(__file__).parent
PACKAGES = ("kubernetes-validate==1.37.0", "kubeflow-trainer-api==2.3.0")


@pytest.mark.proof
def test_manifests_fit_the_published_schemas_and_models(tmp_path: Path) -> None:
    """In an environment of its own: nothing else needs these packages."""
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", *PACKAGES]
    done = subprocess.run(install, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"manifests NOT TESTED: {PACKAGES} cannot be had here: {done.stderr[-300:]}")
    source = str(Path(shoal.__file__).parent.parent)
    told = subprocess.run(
        [python, str(HERE / "manifest_models.py")],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert told.returncode == 0, told.stderr[-3000:]
    assert len(told.stdout.splitlines()) == 4, (told.stdout, sys.version)
