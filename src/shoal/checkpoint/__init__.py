"""Saves a run's state so that a crash, a full disk or a flipped byte never costs more than a step.

Import the modules directly: `write` (save), `read` (load on any layout), `export` (one file for
others) need torch; `catalog` (list, verify), `manifest` and `lease` do not, so this file is empty.
"""
