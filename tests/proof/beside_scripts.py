"""Runs scripts of the neighbours' own repositories by Shoal and by the neighbour, and compares losses.

    python tests/proof/beside_scripts.py --sources FOLDER --python accelerate=.venv-proof/bin/python \
        --python deepspeed=ENV/bin/python [--only cv_example,…] [--out proof/results/neighbours.json]

The scripts stand outside of this repository, in FOLDER/REPOSITORY as git checked them out (with a file
COMMIT that names what), and run as they are. Hub, data sets and images are answered by local stand-ins (tests/neighbours/stand_ins, a
model of two layers in FOLDER/local). Each row: the same script, arguments and processes twice,
once by the neighbour and once by `shoal run --as`, in the same environment; what every rank hands to
`backward` is written down by both. A row that names a mistake of the neighbour's is run a third time,
by the neighbour without that mistake (sitecustomize.py of the stand-ins), which must find our losses.
Rows of a file are replaced one by one, so it may be cut short.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = ROOT / "tests" / "neighbours" / "stand_ins"
ADDRESS = "https://github.com/"
FIRST = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "optimizer":
         {"type": "AdamW", "params": {"lr": 1e-3}}}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A script, and how it is run.

    mistake   the neighbour's, that makes its losses others · mended  what turns it off
    format    of the products: in bf16 the two round at other places
    """

    library: str
    repository: str
    path: str
    words: tuple[str, ...] = ()
    processes: int = 2
    config: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    name: str = ""
    images: bool = True
    format: str = "fp32"
    mistake: str = ""
    mended: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """How the row is named on the command line and in the record."""
        return self.name or Path(self.path).stem


def accelerate(path: str, *words: str, **more: Any) -> Row:
    """An example of Accelerate's."""
    return Row("accelerate", "huggingface/accelerate", f"examples/{path}.py", words, **more)


def deepspeed(path: str, *words: str, config: dict[str, Any] | None = None, **more: Any) -> Row:
    """An example of DeepSpeed's; `config` is the file ds_config.json of the folder it runs in."""
    return Row(
        "deepspeed",
        more.pop("repository", "deepspeedai/DeepSpeedExamples"),
        path,
        words,
        config=config or {},
        **more,
    )


ON_CPU = {"ACCELERATE_USE_CPU": "true"}
"""For scripts without --cpu, whose processes would train by themselves."""
TESTS = "src/accelerate/test_utils/scripts/external_deps"
LLAMA = ("--model_name", "HuggingFaceTB/SmolLM-360M")
IMAGES = ("--data_dir", "images")
ROWS = [
    accelerate("nlp_example", "--cpu"),
    accelerate("by_feature/gradient_accumulation", "--cpu", "--gradient_accumulation_steps", "3"),
    accelerate("by_feature/checkpointing", "--cpu", "--checkpointing_steps", "epoch"),
    accelerate("cv_example", "--cpu", *IMAGES),
    accelerate("by_feature/tracking", "--cpu", "--with_tracking"),
    accelerate("by_feature/multi_process_metrics", "--cpu"),
    accelerate("by_feature/early_stopping", "--cpu"),
    accelerate("by_feature/memory", "--cpu"),
    accelerate("by_feature/automatic_gradient_accumulation", "--cpu"),
    accelerate("by_feature/profiler", "--cpu"),
    accelerate("by_feature/local_sgd", "--cpu", "--local_sgd_steps", "2"),
    accelerate("by_feature/ddp_comm_hook", "--cpu"),
    accelerate("by_feature/cross_validation", "--cpu"),
    accelerate("by_feature/schedule_free", "--cpu"),
    accelerate(
        "by_feature/gradient_accumulation_for_autoregressive_models",
        *("--cpu", "--gradient_accumulation_steps", "3", "--per_device_batch_size", "4"),
        name="gradient_accumulation_for_autoregressive_models",
    ),
    *(
        accelerate(
            f"by_feature/{name}",
            *("--dataset_name", "Salesforce/wikitext", "--dataset_config_name", "wikitext-2-v1"),
            *("--model_name_or_path", "HuggingFaceTB/SmolLM-360M", "--block_size", "32"),
            *("--per_device_train_batch_size", "2", "--num_train_epochs", "1", "--seed", "3"),
            *("--gradient_accumulation_steps", "2", "--learning_rate", "1e-3"),
            *("--output_dir", "out", *more),
            environ=ON_CPU,
        )
        for name, *more in (
            ("deepspeed_with_config_support",),
            ("megatron_lm_gpt_pretraining", "--checkpointing_steps", "9"),
        )
    ),
    *(
        Row(
            "accelerate",
            "huggingface/accelerate",
            f"{TESTS}/{name}.py",
            ("--output_dir", ".", "--num_epochs", "3"),
            environ=ON_CPU,
        )
        for name in ("test_performance", "test_checkpointing")
    ),
    accelerate("complete_nlp_example", "--cpu", "--checkpointing_steps", "3"),
    accelerate("complete_cv_example", "--cpu", *IMAGES, "--checkpointing_steps", "epoch"),
    *(
        deepspeed(
            "training/cifar/cifar10_deepspeed.py",
            *("--dtype", "fp32", "--epochs", "2", "--stage", str(stage)),
            name=f"cifar10_deepspeed stage {stage}",
        )
        for stage in range(4)
    ),
    deepspeed(
        "training/gan/gan_deepspeed_train.py",
        *("--dataset", "fake", "--workers", "0", "--imageSize", "64", "--ngf", "8", "--ndf", "8"),
        *("--batchSize", "8", "--local_rank", "0", "--deepspeed_config", "ds_config.json"),
        config={"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.0},
        name="gan_deepspeed_train.py",
        processes=1,
    ),
    deepspeed(
        "training/pipeline_parallelism/train.py",
        *("-p", "0", "-s", "8", "--deepspeed_config", "ds_config.json"),
        config={**FIRST, "gradient_accumulation_steps": 2},
        name="pipeline_parallelism/train.py -p 0",
    ),
    deepspeed(
        "training/imagenet/main.py",
        *("--local_rank", "0", "--epochs", "1", "-b", "4", "-j", "0", "--seed", "1", "--lr", "0.01"),
        *("--deepspeed_config", "ds_config.json", "images"),
        config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1},
                "zero_allow_untested_optimizer": True},
        name="imagenet/main.py",
        processes=1,
    ),
    deepspeed(
        "training/bf16_master_weight/train.py",
        *("--hidden_dim", "64", "--num_layers", "2", "--num_heads", "4", "--vocab_size", "200"),
        *("--seq_length", "32", "--num_steps", "12", "--deepspeed_config", "ds_config.json"),
        config={**FIRST, "zero_optimization": {"stage": 2}},
        name="bf16_master_weight/train.py",
    ),
    deepspeed(
        "examples/sdma_allgather/train_zero3.py",
        *("--vocab_size", "200", "--hidden_size", "64", "--num_layers", "2", "--num_heads", "4"),
        *("--max_seq_len", "32", "--num_samples", "64", "--train_steps", "12"),
        *("--deepspeed_config", "ds_config.json"),
        repository="deepspeedai/DeepSpeed",
        config={**FIRST, "zero_optimization": {"stage": 3},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}},
        name="sdma_allgather/train_zero3.py",
    ),
    deepspeed(
        "examples/sdma_allgather/train_qwen3_zero3.py",
        *("--model_name", "HuggingFaceTB/SmolLM-360M", "--dataset", "synthetic"),
        *("--seq_length", "32", "--num_steps", "12", "--warmup_steps", "2"),
        *("--ds_config", "ds_config.json"),
        repository="deepspeedai/DeepSpeed",
        config={"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "optimizer":
                {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
                "zero_optimization": {"stage": 3}},
        name="sdma_allgather/train_qwen3_zero3.py",
        images=False,
        mistake="weights are cut as soon as a layer is made, so transformers initialises tensors "
        "without elements: the model keeps torch's defaults",
        mended={"CUT_LATE": "1"},
    ),
    deepspeed(
        "training/DeepSpeed-ZenFlow/finetuning/finetune_llama.py",
        *(*LLAMA, "--lr", "1e-3", "--batch_size", "2", "--num_train_epochs", "1"),
        *("--output_dir", "out", "--deepspeed_config", "ds_config.json"),
        config={**FIRST, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        name="DeepSpeed-ZenFlow/finetuning/finetune_llama.py",
        processes=1,
        format="bf16",
        images=False,
    ),
    deepspeed(
        "training/DeepSpeed-SuperOffload/finetune_zero3.py",
        *(*LLAMA, "--lr", "1e-3", "--batch_size", "2", "--max_length", "48"),
        *("--output_dir", "out", "--attn_implementation", "eager", "--activation_checkpointing"),
        *("--deepspeed_config", "ds_config.json"),
        config={"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "zero_optimization":
                {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}},
        name="DeepSpeed-SuperOffload/finetune_zero3.py",
        format="bf16",
        images=False,
    ),
    deepspeed(
        "training/HelloDeepSpeed/train_bert_ds.py",
        *("--checkpoint_dir", "out", "--num_layers", "2", "--num_heads", "4", "--h_dim", "32"),
        *("--ff_dim", "64", "--num_iterations", "13", "--max_seq_length", "32"),
        *("--dtype", "bf16", "--checkpoint_every", "8"),
        name="HelloDeepSpeed/train_bert_ds.py",
        processes=1,
        format="bf16, the loss too",
        images=False,
    ),
]  # fmt: skip


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--sources", type=Path, required=True)
    words.add_argument("--python", action="append", default=[])
    words.add_argument("--only", default="")
    words.add_argument("--deadline", type=float, default=560)
    words.add_argument("--out", type=Path, default=ROOT / "proof" / "results" / "neighbours.json")
    asked = words.parse_args()
    pythons = dict(one.split("=", 1) for one in asked.python)
    only = asked.only.split(",") if asked.only else [row.title for row in ROWS]
    for row in ROWS:
        if row.title in only and row.library in pythons:
            local = made_local(asked.sources / "local", pythons[row.library])
            told = beside(row, asked.sources, local, pythons[row.library], asked.deadline)
            keep(asked.out, row.title, told)
            print(
                row.title, {k: v for k, v in told.items() if k in ("difference", "steps", "fails")}
            )


def beside(row: Row, sources: Path, local: Path, python: str, deadline: float) -> dict[str, Any]:
    """Both runs of a script, and how far their losses are apart."""
    folder = sources / row.repository.split("/")[1]
    script = folder / row.path
    told: dict[str, Any] = {
        "library": row.library,
        "address": f"{ADDRESS}{row.repository}/blob/HEAD/{row.path}",
        "commit": (folder / "COMMIT").read_text().strip(),
        "sha256": hashlib.sha256(script.read_bytes()).hexdigest(),
        "blob": blob(script),
        "words": list(row.words),
        "config": row.config,
        "processes": row.processes,
        "format": row.format,
    }
    found = {}
    for side in ("theirs", "ours", *(["mended"] if row.mistake else [])):
        with tempfile.TemporaryDirectory() as place:
            at = Path(place)
            shutil.copytree(local, at, dirs_exist_ok=True)
            (at / "ds_config.json").write_text(json.dumps(row.config))
            (at / "losses").mkdir()
            start = ["-m", "torch.distributed.run", "--standalone"]
            start += [f"--nproc-per-node={row.processes}"]
            if side == "ours":
                start += ["-m", "shoal", "run", "--as", row.library, "--"]
            more = row.mended if side == "mended" else {}
            words = [python, *start, str(script), *row.words]
            code, said = ran(words, at, environ(row, at) | more, deadline)
            if code:
                told["fails"] = f"{side}: {last_line(said)}"
                sys.stderr.write(said[-6000:])
                return told
            ranks = sorted((at / "losses").glob("rank-*.json"))
            found[side] = [json.loads(rank.read_text()) for rank in ranks]
    # The script is the one whose hash was taken before: nobody wrote to it.
    told["changed"] = hashlib.sha256(script.read_bytes()).hexdigest() != told["sha256"]
    if row.mistake:
        as_it_is = compared(found["theirs"], found["ours"])["difference"]
        told |= {"mistake": row.mistake, "as_it_is": as_it_is, "mended": row.mended}
    return told | compared(found["mended" if row.mistake else "theirs"], found["ours"])


def ran(
    words: list[str], at: Path, environment: dict[str, str], deadline: float
) -> tuple[int, str]:
    """Run a command and all that it starts. Gives its exit status (1: not in time), and stderr."""
    with subprocess.Popen(
        words,
        cwd=at,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as one:
        try:
            said = one.communicate(timeout=deadline)[1]
        except subprocess.TimeoutExpired:
            for group in {one.pid, *started_by(one.pid)}:  # torchrun gives each worker a group
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            return 1, f"Error: it did not end in {deadline:g} s"
        return one.returncode, said


def started_by(pid: int) -> list[int]:
    """The processes that a process started, which lead groups of their own."""
    there = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(one) for one in there.read_text().split()] if there.exists() else []
    return [one for one in found if os.getpgid(one) == one]


def blob(script: Path) -> str:
    """Git's own name of a file's bytes: `git rev-parse COMMIT:PATH` gives it where nothing differs."""
    held = script.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(held) + held, usedforsecurity=False).hexdigest()


def environ(row: Row, at: Path) -> dict[str, str]:
    """What a run is given: stand-ins first, no network, one thread."""
    paths = [str(STAND_INS), str(ROOT / "src")]
    if "cv_" in row.path or (row.library == "deepspeed" and row.images):
        paths.append(str(STAND_INS / "images"))  # transformers would want more of torchvision
    paths += filter(None, [os.environ.get("PYTHONPATH")])  # what else a script imports
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "LOSSES": str(at / "losses"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(at / "hub"),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "WANDB_MODE": "disabled",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(Path.home() / ".cache" / "torch_extensions"),
        **{k: v for k, v in os.environ.items() if k == "TORCH_EXTENSIONS_DIR"},
        **row.environ,
    }


def compared(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest relative difference of a loss, over ranks and steps, and what was loaded."""
    pairs = [
        (a, b)
        for one, other in zip(theirs, ours, strict=True)
        for a, b in zip(one["losses"], other["losses"], strict=False)
    ]
    counts = [[len(rank["losses"]) for rank in side] for side in (theirs, ours)]
    return {
        "steps": counts[1],
        "same_count": counts[0] == counts[1],
        "difference": max(abs(a - b) / max(1e-12, abs(a)) for a, b in pairs),
        "first": pairs[0][0],
        "last": pairs[-1][0],
        "losses": {"theirs": theirs[0]["losses"], "ours": ours[0]["losses"]},
        "told_the_same": all(
            [one.get(k) for k in ("version", "available")]
            == [other.get(k) for k in ("version", "available")]
            for one, other in zip(theirs, ours, strict=True)
        ),
        "version": ours[0]["version"],
        "available": ours[0].get("available"),
        "transformers": ours[0].get("transformers"),
        "loaded": {"theirs": theirs[0]["loaded"], "ours": ours[0]["loaded"]},
    }


def last_line(text: str) -> str:
    """The last line that says what was wrong."""
    lines = [line for line in text.splitlines() if "Error" in line or "shoal" in line]
    return (lines or text.splitlines() or ["nothing was said"])[0]


def keep(out: Path, title: str, told: dict[str, Any]) -> None:
    """Put a row in the place of the one before."""
    rows = json.loads(out.read_text()) if out.exists() else {}
    rows[title] = told
    out.write_text(json.dumps(rows, indent=1) + "\n")


def made_local(folder: Path, python: str) -> Path:
    """A model of two layers, its words, sentences in pairs and images, made once in `folder`."""
    if not folder.exists():
        subprocess.run([python, str(STAND_INS / "local_data.py"), str(folder)], check=True)
    return folder


if __name__ == "__main__":
    main()
