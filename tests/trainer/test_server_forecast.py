"""The forecast of a parameter server counts the process without its model, which it adds itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from shoal.config.load import load_config
from shoal.trainer.servers import server_loop


def test_what_was_held_before_the_model_is_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[float] = []
    monkeypatch.setattr(
        server_loop, "forecast_run",
        lambda config, facts, plan, cluster: seen.append(cluster.device.reserved_bytes) or {},
    )  # fmt: skip
    monkeypatch.setattr(server_loop, "write_opening", lambda *rest, **more: None)
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))  # an unmeasured machine
    config = load_config(None, []).config
    server: Any = SimpleNamespace(
        run=SimpleNamespace(world=SimpleNamespace(writes_files=True)),
        config=config, source=None, plan=None, total=1,
    )  # fmt: skip
    world: Any = SimpleNamespace(size=2, device=torch.device("cpu"))
    cast(Any, server_loop.ParameterServer.open)(server, tmp_path, world, 12345)
    assert seen == [12345]
