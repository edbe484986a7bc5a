"""Save and load a run's state, so that a crash costs no more than the last few steps.

A full disk and a flipped byte are detected, and an older checkpoint is used. This file is empty:
`save.write` (save), `load.read` (load on any layout) and `export` need torch, while
`format.listing` (list, verify), `format.manifest` and `format.lease` do not.
"""
