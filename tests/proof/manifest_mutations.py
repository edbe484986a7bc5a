"""Seeded mutations of a checkpoint's manifest.json, half of them sealed again with a right digest.

    python tests/proof/manifest_mutations.py [--count 1000] [--seed 0] [--write FILE]

A run of one process saves once; then each mutation takes the manifest's place and the run is asked
to restore it and to verify it. Right is: it is refused in one line that names the file (or the tensor
and the step, where a forger took a tensor away whole), or it is restored because what changed says
nothing wrong. Wrong is any other exception, and what takes longer than LONG_S. How often the line
names a key on the way to the change is counted.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.base.errors import ShoalError
from shoal.checkpoint.format.listing import verify

LONG_S = 20.0
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1 << 62, 1e308, "", "x", "../../etc/passwd", [], {}, [[]], {"": 0}),
    *([1] * 300, "y" * 5000, {"a": {"b": {"c": []}}}, "NaN", 0.5, [None], "step-1"),
)


def sealed(content: dict[str, Any]) -> bytes:
    """The bytes that a forger would write."""

    def canonical(value: Any) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    content = {key: value for key, value in content.items() if key != "digest"}
    digest = hashlib.sha256(canonical(content)).hexdigest()
    return canonical({**content, "digest": digest}) + b"\n"


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, by its keys."""
    found = [path] if path else []
    listed = enumerate(value) if isinstance(value, list) else ()
    for key, one in value.items() if isinstance(value, dict) else listed:
        found += places(one, (*path, key))
    return found


def mutated(content: dict[str, Any], draw: random.Random) -> tuple[dict[str, Any], str]:
    """The manifest with one to three places changed, deleted or copied elsewhere."""
    new = copy.deepcopy(content)
    told = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        *outer, last = draw.choice(places(new))
        holder = new
        for key in outer:
            holder = holder[key]
        kind = draw.choice(("value", "value", "delete", "copy", "add"))
        told.append(f"{kind} {'.'.join(map(str, (*outer, last)))}")
        if kind == "delete":
            del holder[last]
        elif kind == "add" and isinstance(holder, dict):
            holder[f"{last}?"] = draw.choice(VALUES)
        elif kind == "copy":
            source: Any = new
            for key in draw.choice(places(new)):
                source = source[key]
            holder[last] = copy.deepcopy(source)
        else:
            holder[last] = draw.choice(VALUES)
    return new, ", ".join(told)


def keys_of(told: str) -> list[str]:
    """The names on the way to what was changed; numbers of lists apart."""
    words = [part for one in told.split(", ") for part in one.partition(" ")[2].split(".")]
    return [word for word in words if word and not word.isdigit()]


def scrambled(data: bytes, draw: random.Random) -> bytes:
    """The file with some bytes overwritten, cut or doubled."""
    raw, at = bytearray(data), draw.randrange(len(data))
    kind = draw.choice(("bytes", "cut", "double"))
    if kind == "cut":
        return bytes(raw[:at])
    if kind == "double":
        return bytes(raw[:at] + raw[at // 2 :])
    for _ in range(draw.choice((1, 3, 30))):
        raw[draw.randrange(len(raw))] = draw.randrange(256)
    if raw == data:  # what was drawn stood there
        raw[at] ^= 1
    return bytes(raw)


def trials(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """What became of each."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    run = shoal.parallelize(
        model,
        torch.optim.AdamW(model.parameters()),
        batch=8,
        micro_batch=4,
        folder=folder,
    )
    data = [(torch.randn(8), torch.tensor(0)) for _ in range(16)]
    for batch in run.loader(data):
        run.step(batch)
    run.save()
    root = folder / "checkpoints"
    (saved,) = root.glob("step-*")
    right = (saved / "manifest.json").read_bytes()
    content = json.loads(right)
    kept = folder / "kept"
    shutil.copytree(saved, kept)
    counts: Counter[str] = Counter()
    wrong: list[dict[str, str]] = []
    for number in range(count):
        draw = random.Random(f"{seed}/{number}")
        is_sealed = number % 2 == 1
        changed, told = mutated(content, draw) if is_sealed else ({}, "bytes")
        new = sealed(changed) if is_sealed else scrambled(right, draw)
        shutil.rmtree(root)
        shutil.copytree(kept, saved)
        (saved / "manifest.json").write_bytes(new)
        how = "sealed" if is_sealed else "bytes"
        began_s = time.monotonic()
        for verb, tries in (("verify", lambda: verify(saved)), ("restore", run.restore)):
            try:
                answer = tries()
                done = "refused" if verb == "verify" and answer else "taken"
            except ShoalError as refusal:
                done = "refused"
                of_step = "at step 2" in str(refusal)  # a tensor that the model has, and it has not
                if "\n" in str(refusal) or not ("manifest.json" in str(refusal) or of_step):
                    done = "refused without the file's name"
                    told += f" | {refusal}"
                elif is_sealed:
                    named = any(key in str(refusal) for key in keys_of(told))
                    counts[f"sealed: {verb}: a changed key is named: {named}"] += 1
            except BaseException as failure:
                done = type(failure).__name__
                told += f" | {traceback.format_exc()[-600:]}"
            counts[f"{how}: {verb}: {done}"] += 1
            if done not in ("refused", "taken"):
                wrong.append({"number": str(number), "verb": verb, "what": told, "said": done})
        if time.monotonic() - began_s > LONG_S:
            wrong.append({"number": str(number), "verb": "both", "what": told, "said": "long"})
    run.close()
    return {"count": count, "seed": seed, "counts": dict(sorted(counts.items())), "wrong": wrong}


def main() -> int:
    """Do them, print what came of it; 1 where something is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = trials(asked.count, asked.seed, Path(folder) / "run")
    text = json.dumps(found, indent=1)
    print(text)
    if asked.write:
        asked.write.write_text(text + "\n")
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
