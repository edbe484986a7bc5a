"""A small residual network for images: convolutions whose output is added to their input.

Formula   stem 3×3 → stages × blocks of  relu(x + bn(conv(relu(bn(conv(x))))))  → mean → classes
          Each stage but the first halves height and width and doubles the channels; `width` widens
          all stages. Any image of at least one pixel works: 8 × 8 digits as well as 32 × 32 × 3.
Source    He et al. 2015 (1512.03385), the CIFAR form; width: Zagoruyko and Komodakis 2016
"""

from __future__ import annotations

from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with a skip connection, a 1×1 convolution where shapes change."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.activation = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, inputs, h, w] to [batch, outputs, h / stride, w / stride]."""
        y = self.activation(self.first_norm(self.first(x)))
        return self.activation(self.second_norm(self.second(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Residual network for images; arguments as in `shoal.forecast.models.model_facts`."""

    def __init__(
        self,
        *,
        classes: int,
        image_channels: int,
        channels: int,
        width: int,
        stages: int,
        blocks: int,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(image_channels, channels, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(channels)
        self.activation = nn.ReLU()
        self.blocks = nn.ModuleList()
        inputs = channels
        for stage in range(stages):
            outputs = channels * width * 2**stage
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                self.blocks.append(ResidualBlock(inputs, outputs, stride))
                inputs = outputs
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [batch, image_channels, height, width] to logits [batch, classes]."""
        x = self.activation(self.stem_norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))
