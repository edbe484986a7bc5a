"""Reads run folders, never torch: live progress in a terminal, a block at the end of a run."""

from shoal.view.live import LiveView
from shoal.view.run_folder_reader import RunFolder
from shoal.view.summary import summary

__all__ = ["LiveView", "RunFolder", "summary"]
