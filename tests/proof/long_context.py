"""64k tokens on four ranks, under a limit on each one's memory that one process exceeds.

`make proof` runs it. The result lands in proof/results/long-context.json: what one process said under
the limit, the loss of the four ranks beside that of one process without a limit, and the bytes that
a forward pass keeps for the backward pass.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "worlds"))
TARGET = ROOT / "proof" / "results" / "long-context.json"

import torch  # noqa: E402

from context_case import LONG  # noqa: E402
from worlds import Members  # noqa: E402

TOKENS, RANKS, ROOM_MIB, DEADLINE_S = 65536, 4, 256, 900.0


def main() -> int:
    with tempfile.TemporaryDirectory() as logs:
        members = Members(RANKS, Path(logs))
        try:
            told = members.call(
                "context_case:beyond", deadline_s=DEADLINE_S, sequence=TOKENS, room_mib=ROOM_MIB
            )
        finally:
            members.close()
    first = told[0]
    share = max(one["kept"] for one in told) * RANKS / first["kept alone"]
    off = max(abs(one["together"] - first["right"]) / first["right"] for one in told)
    record = {
        "model": {"name": "llama", **LONG},
        "tokens": TOKENS,
        "layout": {"cp": RANKS},
        "limit_mib_above_start": ROOM_MIB,
        "one process": first["alone"],
        "loss": first["together"],
        "loss of one process": first["right"],
        "kept_bytes": [one["kept"] for one in told],
        "kept_bytes of one process": first["kept alone"],
        "share of 1/ranks": round(share, 4),
        "machine": f"{platform.machine()}, torch {torch.__version__}, fp32, one thread a rank",
    }
    TARGET.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    failed = all("allocate memory" in str(one["alone"]) for one in told)
    return 0 if failed and share <= 1.1 and off <= 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
