"""Old module paths: in a run.toml, and in imports of other packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.base.errors import ConfigError
from shoal.base.moved_modules import current_path
from shoal.config.paths import check_function, load_function

PACKAGE = Path(shoal.__file__).parent
TABLE = (PACKAGE / "base" / "moved_modules.txt").read_text(encoding="utf-8").splitlines()


def test_every_module_of_the_table_is_at_its_new_path_and_not_at_the_old_one() -> None:
    assert len(TABLE) > 300
    for line in TABLE:
        old, new = (PACKAGE.parent / path.replace(".", "/") for path in line.split())
        assert new.with_suffix(".py").exists() or (new / "__init__.py").exists(), line
        assert not old.with_suffix(".py").exists(), line
        assert not old.exists(), line


def test_a_function_named_by_its_old_path_is_found() -> None:
    old, new = "shoal.data.samples:open_digits", "shoal.data.digits"
    assert current_path("shoal.data.samples") == new
    check_function(old, "data.source")
    assert load_function(old, "data.source").__module__ == new
    with pytest.raises(ConfigError, match=r"there is no module shoal\.data\.sample; "):
        check_function("shoal.data.sample:open_digits", "data.source")


SCRIPT = """
import sys, warnings
warnings.simplefilter("error")
import shoal
warnings.simplefilter("always")
import shoal.planner.schedules as old
import shoal.planning.pipeline_schedules as new
from shoal.base.units import bytes_text
assert old is new and new.__spec__.name == "shoal.planning.pipeline_schedules"
assert sys.modules["shoal.base.units"].__name__ == "shoal.base.text.units"
try:
    import shoal.planner.nothing
except ModuleNotFoundError as error:
    print(error)
"""


def test_an_import_by_the_old_path_gives_the_same_module_and_says_where_it_lies() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    moved = "shoal.base.units is shoal.base.text.units since 0.2; the old path goes in 0.3"
    assert moved in done.stderr, done.stderr
    assert "No module named 'shoal.planner.nothing'" in done.stdout
