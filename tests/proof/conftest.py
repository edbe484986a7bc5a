"""Programs that `make proof` runs lie here, no tests: to import them costs seconds, so none is."""

collect_ignore_glob = ["*.py"]
