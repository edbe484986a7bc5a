"""Stands for the package `timm`: a small convolutional model with what the examples ask of one."""

from typing import ClassVar

from torch import nn


class Small(nn.Module):
    default_cfg: ClassVar = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}

    def __init__(self, num_classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 7, stride=8), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4)
        )
        self.classifier = nn.Linear(8 * 16, num_classes)

    def get_classifier(self):
        return self.classifier

    def forward(self, images):
        return self.classifier(self.features(images).flatten(1))


def create_model(name, pretrained=False, num_classes=10):
    return Small(num_classes)
