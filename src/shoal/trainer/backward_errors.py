"""Name errors of torch in a backward pass whose cause is a layout."""

from __future__ import annotations

from shoal.base.errors import ConfigError

LINES = {
    "returned an invalid gradient": (
        "loss: it uses a tensor that the model computed in an earlier pass, before its weights "
        "were split (kept by a forward hook, or in an attribute); try: return it from forward "
        "beside the outputs"
    ),
    "out of bounds for storage of size 0": (
        "loss: its backward pass reads gathered weights that fsdp has freed: the forward pass runs "
        "a backward pass of its own (torch.autograd.grad inside of forward), or a graph is of an "
        "earlier pass; try: layout.strategy=ddp, zero1 or zero2"
    ),
}
"""By a part of torch's text."""


def raise_named_error(error: RuntimeError) -> None:
    """Raise ConfigError in the place of an error of torch, if a layout is its cause.

    Args:
        error: of a backward pass.
    """
    for part, line in LINES.items():
        if part in str(error):
            raise ConfigError(line) from error
