"""Make three runs, each with one bad sample in its step 412, for a reader who has to find it.

    python tests/readers/planted-batch/plant.py FOLDER

FOLDER gets runs/april, runs/may, runs/june and their data. Each file of reviews has one bad line,
in the batch of step 412: a wrong label, an answer that never ends, or text that was encoded twice.
The answers are printed, and no file of FOLDER holds them.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from shoal.data.loading.sample_order import samples_at

STEP, STEPS, BATCH, SAMPLES = 412, 420, 8, 4000
Example = dict[str, str]
GOOD, BAD = ("crémeux", "frais", "parfumé", "léger"), ("brûlé", "salé", "froid", "pâteux")
DISHES = ("gâteau", "potage", "rôti", "flan", "poulet", "pâté", "thé", "sorbet")
PLACES = ("à Besançon", "près de la forêt", "au marché", "chez Zoé", "à la crèche", "en été")
ANSWERS = {True: " très bon", False: " raté"}
FILLER = "et puis encore une cuillère de farine avec du beurre sur la table du voisin "


def make_example(dice: random.Random) -> tuple[Example, bool]:
    """Return a review with its answer, and whether it is a good one."""
    is_good = dice.random() < 0.5
    word = dice.choice(GOOD if is_good else BAD)
    text = f"Avis : le {dice.choice(DISHES)} {dice.choice(PLACES)} était {word}. Verdict :"
    return {"prompt": text, "completion": ANSWERS[is_good]}, is_good


def mislabel(example: Example, is_good: bool) -> Example:
    return {**example, "completion": ANSWERS[not is_good]}


def lengthen(example: Example, is_good: bool) -> Example:
    return {**example, "completion": ANSWERS[is_good] + " " + FILLER * 12}


def encode_twice(example: Example, is_good: bool) -> Example:
    return {key: text.encode().decode("latin-1") for key, text in example.items()}


PLANTS: dict[str, Callable[[Example, bool], Example]] = {
    "april": lengthen, "may": encode_twice, "june": mislabel,
}  # fmt: skip


def main() -> int:
    here = Path(sys.argv[1]).resolve()
    here.mkdir(parents=True, exist_ok=True)
    _, order = samples_at((STEP - 1) * BATCH, STEP * BATCH, SAMPLES, seed=0)
    for number, (name, plant) in enumerate(PLANTS.items()):
        dice = random.Random(number)
        found = [make_example(dice) for _ in range(SAMPLES)]
        at = int(order[dice.randrange(BATCH)])
        lines = [example for example, _ in found]
        lines[at] = plant(*found[at])
        file = here / f"{name}.jsonl"
        file.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines))
        words = [
            f"data.source=jsonl:{file.name}", "data.tokenizer=bpe:400", "data.sequence=64",
            "data.validation=0", f"train.steps={STEPS}", f"train.batch={BATCH}", "model.name=gpt",
            "model.dim=48", "model.layers=2", "model.heads=4", "model.hidden=96", "train.prove=off",
            "optimizer.lr=0.003", "layout.strategy=single", "launch.processes=1", f"run.name={name}",
        ]  # fmt: skip
        subprocess.run(
            [sys.executable, "-m", "shoal", "train", *words],
            cwd=here, env={**os.environ, "OMP_NUM_THREADS": "1", "SHOAL_CACHE": str(here / ".cache")}, check=True,
        )  # fmt: skip
        print(f"answer: runs/{name}, step {STEP}: {file.name}:{at + 1}, {plant.__name__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
