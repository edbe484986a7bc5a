"""`python -m shoal` is the same program as `shoal`."""

from shoal.cli.main import main

main()
