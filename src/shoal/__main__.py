"""Entry point of `python -m shoal`, the same program as `shoal`."""

from shoal.cli.main import main

main()
