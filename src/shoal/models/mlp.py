"""A multilayer perceptron: the smallest model that learns to classify digits.

Formula   x → flatten → layers × (dropout(relu(W·x + b))) → W·x + b: one logit per class
"""

from __future__ import annotations

from torch import Tensor, nn


class MLP(nn.Module):
    """Multilayer perceptron; arguments as in `shoal.forecast.models.model_facts`."""

    def __init__(
        self, *, inputs: int, hidden: int, layers: int, classes: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        widths = [inputs] + [hidden] * layers
        self.layers = nn.ModuleList(
            nn.Linear(before, after) for before, after in zip(widths, widths[1:], strict=False)
        )
        self.activation = nn.ReLU()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map samples [batch, ...] of `inputs` numbers each to logits [batch, classes]."""
        x = x.flatten(1)
        for layer in self.layers:
            x = self.dropout(self.activation(layer(x)))
        return self.head(x)
