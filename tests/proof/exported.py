"""The table of exported folders: families of transformers × fsdp, tp2 and pp2, opened again.

`make proof` runs it. A row trains a tiny model two steps on two processes, saves, and exports it as
one file, as several and averaged; "equal" means that every stored weight is that of
`run.state_dict()`, nothing is missing or left over, and the logits of what `from_pretrained` opens
are those of the family's model with these weights, all to the bit. What is done stays in
proof/results/exported.json, so it can be stopped and started again; --fresh begins anew.

    python tests/proof/exported.py                       everything, about 3 minutes on 2 cores
    python tests/proof/exported.py --families gemma,opt  some rows
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("worlds", "proof", "parallel")]
TARGET = ROOT / "proof" / "results" / "exported.json"
FAMILIES = (
    "llama", "llama tied", "gpt2", "mistral", "qwen2", "qwen3", "gemma", "phi", "gpt-neox", "opt",
    "bloom", "bloom untied", "falcon", "mixtral", "gpt-oss", "stablelm",
)  # fmt: skip
LAYOUTS = ("fsdp", "tp2", "pp2")

from kept_rows import Row, parser_of, rows_before, verdicts, write_rows  # noqa: E402
from source import source_hash  # noqa: E402

from export_case import wrongs  # noqa: E402
from worlds import Failed, Members  # noqa: E402


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--families", default="", help="comma-separated; default: all")
    options = parser.parse_args()
    source = source_hash()
    rows = rows_before(options, TARGET, source)
    wanted = options.families.split(",") if options.families else FAMILIES
    with tempfile.TemporaryDirectory() as logs:
        fill(rows, wanted, Path(logs), source)
    print(verdicts(rows))
    return 0 if all(row["verdict"] in ("equal", "refused") for row in rows.values()) else 1


def fill(rows: dict[str, Row], wanted: tuple[str, ...], logs: Path, source: str) -> None:
    """Make the rows that are missing, in one world."""
    world: Members | None = None
    for family in wanted:
        for layout in LAYOUTS:
            key = f"{family} | {layout}"
            if key in rows:
                continue
            world = world or Members(2, logs)
            began_s = time.monotonic()
            try:
                folder = logs / key.replace(" | ", "-")
                told = world.call(
                    "export_case:exported", name=family, layout=layout, folder=str(folder)
                )[0]
            except Failed as failure:
                last = str(failure).strip().splitlines()[-1]
                refused = last.startswith(
                    ("shoal.base.errors.PlanError", "shoal.base.errors.Config")
                )
                rows[key] = {"verdict": "refused" if refused else "failed", "reason": last}
                world.kill()
                world = None
            else:
                wrong = wrongs(told)
                rows[key] = {"verdict": "different" if wrong else "equal", **counted_names(told)}
                if wrong:
                    rows[key]["reason"] = "; ".join(wrong)
            rows[key] |= {"seconds": round(time.monotonic() - began_s, 1), "source": source}
            print(f"{key}: {rows[key]['verdict']} {rows[key].get('reason', '')}", flush=True)
            write_rows(TARGET, DEFINITION, rows)
    if world is not None:
        world.close()


def counted_names(told: Row) -> Row:
    """A row with the number of stored tensors and files in the place of their names.

    >>> counted_names({"whole": {"stored": ["a", "b"], "class": "X"}, "share held": 0.5})
    {'whole': {'stored': 2, 'class': 'X'}, 'share held': 0.5}
    """
    short = ("stored", "files")
    return {
        kind: {key: len(v) if key in short else v for key, v in one.items()}
        if isinstance(one, dict)
        else one
        for kind, one in told.items()
    }


DEFINITION = (
    "two steps of AdamW on two processes, saved, exported whole, in files of a "
    "quarter, and averaged; opened by AutoModelForCausalLM.from_pretrained; equal to the bit"
)


if __name__ == "__main__":
    sys.exit(main())
