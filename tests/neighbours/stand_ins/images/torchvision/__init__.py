"""Stands for the package `torchvision`: the few transforms, data sets and models of the scripts."""

from . import datasets, models, transforms, utils  # noqa: F401

__version__ = "0.29.1"
