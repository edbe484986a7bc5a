"""Sample tokens one by one from a language model.

Formula   p(next) = softmax(logits / temperature); temperature 0 takes the likeliest token
Limits    no key/value cache: each token runs the model on the last `window` tokens again
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from shoal.models.loss import Unprojected, find_logits


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: Tensor,
    steps: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    *,
    window: int = 256,
) -> Tensor:
    """Sample `steps` more tokens for each row: return [batch, seq + steps] from [batch, seq].

    In eval mode and without gradients; each module's mode is restored. No cache: every token runs
    the model again.

    Args:
        model: returns `Unprojected`, or logits [batch, seq, vocabulary] as `find_logits` finds
            them.
        temperature: divides the logits; lower is safer, 0 always the likeliest.
        generator: of the model's device, for text that can be repeated; None: torch's default.
        window: the model sees this many last tokens; unchecked: keep it within its `sequence`.
    """
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        for _ in range(steps):
            outputs = model(tokens[:, -window:])
            if isinstance(outputs, Unprojected):  # only the last position is projected
                outputs = replace(outputs, hidden=outputs.hidden[:, -1:]).logits()
            last = find_logits(outputs)[:, -1].float()
            if temperature == 0:
                following = last.argmax(-1, keepdim=True)
            else:
                odds = torch.softmax(last / temperature, -1)
                following = torch.multinomial(odds, 1, generator=generator)
            tokens = torch.cat((tokens, following), 1)
    finally:
        for part, mode in modes:  # a part may be in another mode than the whole
            part.training = mode
    return tokens
