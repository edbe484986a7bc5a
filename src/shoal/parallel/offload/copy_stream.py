"""Copies between a device and its host's memory that overlap with compute.

    to the host     starts when the present compute is done; on a stream of its own
    to the device   the same, on another: links carry both directions at once

A tensor on the device is freed only when the compute stream waits for its copy. Freed memory
belongs to the next computation, and a copy that still reads or fills it would come too late.
"""

from __future__ import annotations

from typing import Any

import torch


class CopyStream:
    """Two streams, out and in, between a device and pinned host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams = torch.get_device_module(device)
        self.out, self.back = self.streams.Stream(), self.streams.Stream()

    def empty_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Allocate host memory for a tensor; pinned, since other copies block the host."""
        return torch.empty_like(tensor, device="cpu", pin_memory=self.device.type != "cpu")

    def copy_to_host(
        self, tensor: torch.Tensor, host: torch.Tensor | None = None
    ) -> tuple[Any, Any]:
        """Start a copy to the host, into `host` if given; return (host tensor, end event)."""
        host = self.empty_on_host(tensor) if host is None else host
        return host, self._copy(tensor, host, self.out)

    def copy_to_device(
        self, host: torch.Tensor, into: torch.Tensor | None = None
    ) -> tuple[Any, Any]:
        """Start a copy to the device, into `into` if given; return (device tensor, end event)."""
        tensor = torch.empty_like(host, device=self.device) if into is None else into
        return tensor, self._copy(host, tensor, self.back)

    def wait(self, event: Any) -> None:
        """Make the compute stream wait for a copy; the CPU goes on."""
        self.streams.current_stream(self.device).wait_event(event)

    def finish(self) -> None:
        """Block the CPU until all copies are done."""
        if self.device.type != "cpu":
            self.out.synchronize()
            self.back.synchronize()

    def _copy(self, source: torch.Tensor, target: torch.Tensor, side: Any) -> Any:
        # The source must be written, and the last user of the target's memory must be done.
        side.wait_stream(self.streams.current_stream(self.device))
        with self.streams.stream(side):
            target.copy_(source, non_blocking=True)
            return side.record_event()
