"""End of a script that is proven, and the error of a micro-batch that cannot be recorded."""

from __future__ import annotations

from shoal.base.errors import ShoalError


class ScriptEnd(BaseException):
    """End of the script: after its last step, or because it cannot be proven.

    It is no Exception, so that the script's own `except Exception` does not catch it.

    Attributes:
        reason: why the script cannot be proven; "": it took all its steps.
        needs_sample: the layout needs a `sample=`, and no micro-batch is recorded yet.
    """

    def __init__(self, reason: str = "", *, needs_sample: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.needs_sample = reason, needs_sample


class UnrecordableError(ShoalError):
    """A ShoalError: a micro-batch holds an object that cannot be handed out again."""
