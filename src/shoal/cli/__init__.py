"""The `shoal` command line: one file per verb, heavy imports inside the command."""
