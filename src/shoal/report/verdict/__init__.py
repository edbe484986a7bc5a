"""Verdict on a run: the fault that ended it, or the largest avoidable cost of a step.

`find_verdict(folder)` returns it. It predicts the step without the cause, so a measurement after
the cure can contradict it. docs/reference/verdict.md describes each kind.
"""

from shoal.report.verdict.run_verdict import Verdict, find_verdict

__all__ = ["Verdict", "find_verdict"]
