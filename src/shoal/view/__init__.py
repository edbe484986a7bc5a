"""Text views of run folders, without torch: live progress, diagnosis, a summary at a run's end."""

from shoal.view.live import LiveView
from shoal.view.run_folder_reader import RunFolder
from shoal.view.summary import summarise_run

__all__ = ["LiveView", "RunFolder", "summarise_run"]
