"""Exceptions about checkpoints, each with a text that names the file at fault.

`DamagedFileError` means that the bytes on disk differ from the bytes that were written: the reader
may fall back to an older checkpoint. Every other `CheckpointError` (another model, a newer format)
is not mended by an older file and must not be skipped.
"""

from __future__ import annotations

from pathlib import Path

from shoal.base.errors import CheckpointError, ShoalError


def short_path(path: Path) -> str:
    """Return the recognisable end of a path: the checkpoints folder, the step, the file.

    >>> short_path(Path("/home/ada/runs/llama/checkpoints/step-1200/rank-3.safetensors"))
    'checkpoints/step-1200/rank-3.safetensors'
    """
    steps = [index for index, part in enumerate(path.parts) if part.startswith("step-")]
    first = max(steps[-1] - 1, 0) if steps else -2
    return "/".join(path.parts[first:])


class DamagedFileError(CheckpointError):
    """CheckpointError for a file that is missing, cut short, or holds other bytes than written.

    Attributes:
        file: its path from the checkpoints folder on.
        tensor: name and slice, or "" when the whole file is at fault.
        reason: the difference found.
    """

    def __init__(self, path: Path, reason: str, tensor: str = "") -> None:
        self.file = short_path(path)
        self.tensor = tensor
        self.reason = reason
        super().__init__(f"{self.file}: {tensor + ' ' if tensor else ''}{reason}")

    def fields(self) -> dict[str, str]:
        """Return the attributes as JSON, for events and for other ranks."""
        return {"file": self.file, "tensor": self.tensor, "reason": self.reason}


class DamagedStepError(CheckpointError):
    """CheckpointError: the checkpoint of the one step that the caller wants is damaged."""


class RankFailed(CheckpointError):
    """CheckpointError for a phase that failed on one rank, with the same text on every rank."""

    def __init__(self, rank: int, reason: str, text: str) -> None:
        self.rank = rank
        self.reason = reason
        super().__init__(text)


def describe_failure(failure: BaseException) -> str:
    """Return a failure's cause in a few words: the system's own for OSError, else type and text.

    >>> describe_failure(OSError(28, "No space left on device"))
    'No space left on device'
    >>> describe_failure(ValueError("x"))
    'ValueError: x'
    """
    if isinstance(failure, ShoalError):
        return str(failure)
    if isinstance(failure, OSError) and failure.strerror:
        name = (
            f"{short_path(Path(failure.filename))}: " if isinstance(failure.filename, str) else ""
        )
        return f"{name}{failure.strerror}"
    return f"{type(failure).__name__}: {failure}"
