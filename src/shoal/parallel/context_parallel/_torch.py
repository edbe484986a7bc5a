"""Private names of torch that attention over parts of a sequence uses; tested on 2.13, on CPU."""

import torch

aten = torch.ops.aten

flash_cpu = aten._scaled_dot_product_flash_attention_for_cpu.default
flash_cpu_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
flash_device = aten._scaled_dot_product_flash_attention.default
flash_device_backward = aten._scaled_dot_product_flash_attention_backward.default

__all__ = ["flash_cpu", "flash_cpu_backward", "flash_device", "flash_device_backward"]
