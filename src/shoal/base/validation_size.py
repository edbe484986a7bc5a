"""Number of samples that one validation reads if `train.validate_samples` is `auto`."""

from __future__ import annotations

from shoal.base.errors import ConfigError

VALIDATED_SHARE, LEAST_VALIDATED = 0.15, 64
"""Share of a run's training samples that all its validations together read by default; least
samples of one validation, however short the run is.
"""


def default_validation_samples(batch: int, steps: int, every: int) -> int:
    """Return the samples of one validation if the user sets no number.

    Args:
        batch: samples per optimizer step.
        steps: optimizer steps of the whole run.
        every: steps between validations; 0: one at the end.

    Returns:
        Samples, at least 64; fewer are read if fewer are held out.

    >>> (
    ...     default_validation_samples(16, 150, 0),
    ...     default_validation_samples(16, 150, 50),
    ...     default_validation_samples(8, 3, 0),
    ... )
    (360, 120, 64)
    """
    times = -(-steps // every) if every else 1
    return max(LEAST_VALIDATED, int(VALIDATED_SHARE * batch * steps) // max(times, 1))


def check_validation_samples(samples: str) -> None:
    """Refuse a `train.validate_samples` that is neither a number nor a word for one.

    Raises:
        ConfigError: the value is neither; with the legal values.
    """
    if samples not in ("auto", "all") and not samples.isdecimal():
        raise ConfigError(
            f"train.validate_samples = {samples}: not a number of samples, and neither auto nor "
            f"all; try: train.validate_samples=all"
        )
