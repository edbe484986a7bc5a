"""Lets the tests share `watched`; the scripts are run, never imported: some need absent libraries."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

collect_ignore_glob = ["before_*.py", "after_*.py"]
