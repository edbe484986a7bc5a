"""What two ranks read of 64 MiB of data, from every kind of source, in bytes (of some text 192).

`make proof` runs it, in the environment that has the libraries of the extra `data`. A row is `shoal
train` on two processes for an epoch of samples (text: some steps). Counted is `rchar` of
/proc/PID/io, what was asked of read(), of all its processes; what the same command asks for on 128
KiB of such data is taken off. The first start begins with an empty cache, the others find its own.

    python tests/proof/bytes_read.py               everything, about 12 minutes on 2 idle cores
    python tests/proof/bytes_read.py --rows wds    some rows

Limits   pages that are mapped (`tokens`, what is cached, arrow files) are not read() and not seen
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "proof")]
TARGET = ROOT / "proof" / "results" / "bytes-read.json"

from kept_rows import Row, parser_of, rows_before, write_rows  # noqa: E402
from source import source_hash  # noqa: E402

MOST = 1.1
LARGE, SMALL = 64 * 2**20, 2**17
DEADLINE_S = 900
SUBREAPER = 36
STARTS = ("first start", "second start", "third start, 2 workers")
DEFINITION = (
    "shoal train, 2 processes; rchar of all processes, less what the first start on 128 KiB of such "
    "data takes, over the bytes of the data. Nothing is cached at the first start; without workers "
    "but for the third"
)
STREAMED = """
import os, torch
from torch import nn

def data():
    import datasets
    files = sorted(os.path.join("data", name) for name in os.listdir("data"))
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True)

def collate(rows):
    counts = torch.tensor([[float(row["text"].count(letter)) for letter in "abcdefgh"] for row in rows])
    return counts / 100, torch.tensor([len(row["text"]) % 4 for row in rows])

def build():
    return nn.Linear(8, 4)
"""

TRAIN = [
    "run.name=run", "train.prove=off", "launch.processes=2", "checkpoint.every=1000",
]  # fmt: skip
TEXT = [
    "data.tokenizer=bpe:800", "data.sequence=64", "train.batch=8", "train.micro_batch=2",
    "model.dim=16", "model.layers=1", "model.heads=2",
]  # fmt: skip
IMAGES = [
    "model.name=resnet", "model.classes=3", "model.image_channels=3", "data.image_size=8",
    "train.batch=16", "train.micro_batch=4",
]  # fmt: skip
OWN = [
    "data.source=streamed:data", "data.collate=streamed:collate", "model.build=streamed:build",
    "train.batch=256", "train.micro_batch=32",
]  # fmt: skip

Writer = Callable[[Path, int], tuple[int, int]]
"""Writes so many bytes of data into a folder: (bytes, samples)."""


def texts(total: int) -> list[str]:
    """Texts of 4 KB of some 500 words; the same for the same size."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(500)]
    made = []
    for _ in range(total // 4096 + total // 2**19 + 1):
        made.append(" ".join(draw.choices(words, k=760))[:4080].ljust(4080, "."))
    return made


def write_lines(folder: Path, total: int) -> tuple[int, int]:
    """64 files of JSON lines."""
    lines = [json.dumps({"text": text}) + "\n" for text in texts(total)]
    for number in range(64):
        (folder / f"{number:02}.jsonl").write_text("".join(lines[number::64]))
    return size_of(folder), len(lines)


def write_plain(folder: Path, total: int) -> tuple[int, int]:
    """64 files of text."""
    made = texts(total)
    for number in range(64):
        (folder / f"{number:02}.txt").write_text("\n".join(made[number::64]))
    return size_of(folder), len(made)


def write_both(folder: Path, total: int) -> tuple[int, int]:
    """JSON lines, and as many bytes of parquet."""
    for name, write in (("lines", write_lines), ("columns", write_parquet)):
        (folder / name).mkdir()
        write(folder / name, total // 2)
    return size_of(folder), total // 4096


def write_parquet(folder: Path, total: int) -> tuple[int, int]:
    """16 files, uncompressed."""
    import pyarrow as pa
    import pyarrow.parquet

    made = texts(total)
    for number in range(16):
        table = pa.table({"text": made[number::16]})
        pyarrow.parquet.write_table(
            table, folder / f"{number:02}.parquet", compression="none", use_dictionary=False
        )
    return size_of(folder), len(made)


def write_hf(folder: Path, total: int) -> tuple[int, int]:
    """What `save_to_disk` writes."""
    import datasets

    made = texts(total)
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": made}).save_to_disk(folder / "saved")
    return size_of(folder), len(made)


def write_tokens(folder: Path, total: int) -> tuple[int, int]:
    """One file of uint16."""
    ids = np.random.default_rng(0).integers(0, 1000, total // 2 + 2**12, dtype=np.uint16)
    np.save(folder / "train.npy", ids)
    return size_of(folder), len(ids) // 64


def pictures(total: int) -> list[bytes]:
    """Images of 197 KB of noise."""
    from PIL import Image

    draw, made = np.random.default_rng(0), []
    for _ in range(max(40, total // 196_662 + 1)):
        file = io.BytesIO()
        side = 256 if total == LARGE else 8
        noise = draw.integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(noise).save(file, "BMP")
        made.append(file.getvalue())
    return made


def write_images(folder: Path, total: int) -> tuple[int, int]:
    """Three classes."""
    made = pictures(total)
    for number, picture in enumerate(made):
        at = folder / "abc"[number % 3] / f"{number:04}.bmp"
        at.parent.mkdir(exist_ok=True)
        at.write_bytes(picture)
    return size_of(folder), len(made)


def write_shards(folder: Path, total: int) -> tuple[int, int]:
    """8 shards."""
    made = pictures(total)
    for shard in range(8):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(shard, len(made), 8):
                for ending, content in (("bmp", made[number]), ("cls", b"%d" % (number % 3))):
                    info = tarfile.TarInfo(f"{number:04}.{ending}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return size_of(folder), len(made)


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


MIXTURE = "mix:0.5*jsonl:data/lines/*.jsonl+0.5*parquet:data/columns/*.parquet"

SOURCES: dict[str, tuple[Writer, list[str], int]] = {
    "text": (write_plain, [*TEXT, "data.source=text:data/*.txt"], 0),
    "jsonl": (write_lines, [*TEXT, "data.source=jsonl:data/*.jsonl"], 0),
    "jsonl, 192 MiB": (write_lines, [*TEXT, "data.source=jsonl:data/*.jsonl"], 0),
    "parquet": (write_parquet, [*TEXT, "data.source=parquet:data/*.parquet"], 0),
    "parquet, 192 MiB": (write_parquet, [*TEXT, "data.source=parquet:data/*.parquet"], 0),
    "mixture": (write_both, [*TEXT, f"data.source={MIXTURE}"], 0),
    "hf folder": (write_hf, [*TEXT, "data.source=hf:data/saved"], 0),
    "hf streaming": (write_lines, OWN, 256),
    "wds": (write_shards, [*IMAGES, "data.source=wds:data/*.tar"], 16),
    "images": (write_images, [*IMAGES, "data.source=images:data"], 16),
    "tokens": (write_tokens, [*TEXT, "data.source=tokens:data"], 0),
}
"""By name: who writes the data, the command's words, samples of a step where a whole epoch runs."""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", default="", help="comma-separated words of rows; default: all")
    options = parser.parse_args()
    source = source_hash()
    rows = rows_before(options, TARGET, source)
    words = [word for word in options.rows.split(",") if word]
    for name in SOURCES:
        if name in rows or (words and not any(word in name for word in words)):
            continue
        rows[name] = {**measured(name), "source": source}
        print(f"{name}: {rows[name]}", flush=True)
        write_rows(TARGET, DEFINITION, rows)
    return 0 if all(row["verdict"] == "read once" for row in rows.values()) else 1


def measured(name: str) -> Row:
    """Bytes that one kind of source takes on a first start and two others, less a small one's."""
    began_s = time.monotonic()
    write, words, step = SOURCES[name]
    build = ROOT / "build"  # not the system's folder for temporary files: that may be memory
    build.mkdir(exist_ok=True)
    counted: list[int] = []
    large = LARGE * (3 if name.endswith(", 192 MiB") else 1)
    for total, starts in ((SMALL, [0]), (large, [0, 0, 2])):
        folder = Path(tempfile.mkdtemp(dir=build))
        try:
            (folder / "data").mkdir()
            (folder / "streamed.py").write_text(STREAMED)
            data_bytes, samples = write(folder / "data", total)
            steps = max(4, samples * 95 // 100 // step) if step else 4
            for workers in starts:
                command = [*words, f"data.workers={workers}", f"train.steps={steps}"]
                counted.append(bytes_read(folder, [*TRAIN, *command]))
        finally:
            shutil.rmtree(folder)
    small, *more = counted
    ratios = dict(zip(STARTS, ((n - small) / data_bytes for n in more), strict=True))
    return {
        "verdict": "read once" if max(ratios.values()) <= MOST else "read more",
        "data_bytes": data_bytes,
        **{start: round(ratio, 3) for start, ratio in ratios.items()},
        "read_bytes": more,
        "taken_off_bytes": small,
        "seconds": round(time.monotonic() - began_s),
    }


def bytes_read(folder: Path, words: list[str]) -> int:
    """rchar of `shoal train` and all processes below it, by a parent that hears of their ends."""
    environ = {
        **os.environ,
        "SHOAL_CACHE": str(folder / "cache"),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{ROOT / 'src'}:{folder}",
    }
    shutil.rmtree(folder / "runs", ignore_errors=True)
    parent = [sys.executable, __file__, "--count", *words]
    done = subprocess.run(
        parent, cwd=folder, env=environ, capture_output=True, text=True, timeout=DEADLINE_S
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    return int(done.stdout.split()[-1])


def count(words: list[str]) -> int:
    """Run the command, await whatever it leaves behind, print what all of them read.

    The kernel adds what a process read to its parent once that has heard of its end.
    """
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    before = own_bytes()
    done = subprocess.run([sys.executable, "-m", "shoal", "train", *words])
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    print(own_bytes() - before)
    return done.returncode


def own_bytes() -> int:
    """rchar of this process and of the children that it awaited."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told["rchar"])


if __name__ == "__main__":
    sys.exit(count(sys.argv[2:]) if sys.argv[1:2] == ["--count"] else main())
