"""Buffers that forward passes change: statistics of BatchNorm, and buffers of the user's own."""
