"""Small models by the names of large ones."""

from torch import nn


class AlexNet(nn.Module):
    def __init__(self, num_classes=1000):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 11, stride=8), nn.ReLU())
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            nn.Dropout(), nn.Linear(8 * 36, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, num_classes)
        )

    def forward(self, images):
        return self.classifier(self.avgpool(self.features(images)).flatten(1))


def vgg19(**named):
    return AlexNet(**named)


def resnet18(pretrained=False, num_classes=1000):
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, stride=8), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(128, num_classes),
    )  # fmt: skip
