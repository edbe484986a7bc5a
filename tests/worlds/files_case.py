"""Trains a model whose states may be larger than this process's memory; tells digests as JSON.

python files_case.py '{"steps": 2, "folder": "", "restore": false, "limit_bytes": 0, …}'
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
from collections.abc import Iterable
from typing import Any

asked: dict[str, Any] = json.loads(sys.argv[1]) if __name__ == "__main__" else {}
if asked.get("limit_bytes"):  # before torch has taken anything
    resource.setrlimit(resource.RLIMIT_DATA, (asked["limit_bytes"], asked["limit_bytes"]))

import torch  # noqa: E402

import shoal  # noqa: E402
from shoal.models.catalog import build  # noqa: E402

SEQUENCE, VOCABULARY, STATE_BYTES = 32, 1024, 16  # weight, gradient, two moments


def digest(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().numpy())
    return found.hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (2, SEQUENCE + 1), generator=draws)
    model = {"dim": asked["dim"], "layers": asked["layers"], "heads": 8}
    run = shoal.parallelize(
        lambda: build("llama", model, vocabulary=VOCABULARY, sequence=SEQUENCE),
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        layout="single",
        batch=2,
        micro_batch=1,
        clip=0.1,
        folder=asked["folder"] or None,
        offload=asked["offload"],
        offload_to=asked["to"],
    )
    assert run.restore() if asked["restore"] else True
    losses = [run.step((tokens[:, :-1], tokens[:, 1:])).loss.hex() for _ in range(asked["steps"])]
    if asked["folder"]:
        run.save()
    state = run.optimizer.state
    moments = [state[p][key] for p in run.program.parameters.values() for key in sorted(state[p])]
    told = {
        "losses": losses,
        "weights": digest(run.program.parameters.values()),
        "moments": digest(moments),
        "states_bytes": STATE_BYTES * run.plan.parameters,
    }
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
