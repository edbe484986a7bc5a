"""Transforms of PIL images and tensors."""

import random

import numpy as np
import torch


class Compose:
    def __init__(self, steps):
        self.steps = steps

    def __call__(self, image):
        for step in self.steps:
            image = step(image)
        return image


class Resize:
    def __init__(self, size):
        self.size = (size, size) if isinstance(size, int) else tuple(size)

    def __call__(self, image):
        return image.resize(self.size)


class CenterCrop(Resize):
    pass


class RandomResizedCrop(Resize):
    def __init__(self, size, scale=(0.08, 1.0)):
        super().__init__(size)
        self.scale = scale

    def __call__(self, image):
        part = random.uniform(*self.scale) ** 0.5
        wide, high = image.size
        w, h = int(wide * part), int(high * part)
        left, top = random.randint(0, wide - w), random.randint(0, high - h)
        return image.crop((left, top, left + w, top + h)).resize(self.size)


class RandomHorizontalFlip:
    def __call__(self, image):
        return image.transpose(0) if random.random() < 0.5 else image


class ToTensor:
    def __call__(self, image):
        return torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1) / 255


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = (torch.tensor(one)[:, None, None] for one in (mean, std))

    def __call__(self, image):
        return (image - self.mean) / self.std
