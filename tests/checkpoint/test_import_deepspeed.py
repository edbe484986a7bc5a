"""DeepSpeed's folders: weights equal to the bit, and one line for what does not add up."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from deepspeed_folder import Writer

from shoal.base.errors import CheckpointError
from shoal.checkpoint.foreign.import_weights import import_weights


@pytest.fixture(autouse=True)
def _without_deepspeed() -> Iterator[None]:
    """What stands for its classes while a folder is written is gone when it is read."""
    yield
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


def writer(folder: Path, ranks: int) -> Writer:
    """Two groups whose sizes no number of ranks divides; frozen, tied and untrained ones."""
    torch.manual_seed(ranks)
    return Writer(
        folder,
        ranks,
        [
            {"embed.weight": torch.randn(11, 3), "up.weight": torch.randn(5, 3)},
            {"up.bias": torch.randn(5), "scale": torch.randn(()), "norm.weight": torch.randn(1)},
        ],
        frozen={"tower.weight": torch.randn(4, 3), "tower.bias": torch.randn(7).bfloat16()},
        buffers={"steps": torch.tensor(9), "mean": torch.randn(3).half()},
        shared={"head.weight": "embed.weight"},
    )


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def check(source: Path, out: Path, expected: dict[str, torch.Tensor]) -> None:
    forget()
    import_weights(source, out)
    assert not [name for name in sys.modules if name.startswith("deepspeed.")]
    with safetensors.safe_open(out / "model.safetensors", "pt") as file:
        assert {*file.keys()} == {*expected}
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
        for name, tensor in expected.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
            assert bits(found) == bits(tensor), name


WRITTEN: dict[str, Callable[[Writer], None]] = {
    "ZeRO 1, padding left out": lambda w: w.write12(lean=True, stage=1),
    "ZeRO 2, padding saved": lambda w: w.write12(lean=False),
    "bf16 optimizer": lambda w: w.write12(lean=True, prefix="bf16_"),
    "ZeRO 3": lambda w: w.write3(sub_group=9),
    "ZeRO 3 in sub-groups": lambda w: w.write3(sub_group=1),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 13])
@pytest.mark.parametrize("how", WRITTEN)
def test_weights_are_equal_to_the_bit(how: str, ranks: int, tmp_path: Path) -> None:
    """13 ranks are more than some parameters have elements: some parts are padding alone."""
    made = writer(tmp_path / "save", ranks)
    WRITTEN[how](made)
    check(tmp_path / "save", tmp_path / "out", made.expected())
    check(made.folder, tmp_path / "of the step itself", made.expected())


def test_what_no_optimizer_has_comes_from_the_module(tmp_path: Path) -> None:
    made = writer(tmp_path / "save", 2)
    made.untrained["extra.weight"] = torch.randn(2, 2).bfloat16()
    made.write12(lean=True)
    forget()
    said = import_weights(tmp_path / "save", tmp_path / "out").said
    assert said == ["as the module holds them: 1 tensor that no optimizer has"]
    check(tmp_path / "save", tmp_path / "again", made.expected())


def test_without_zero_the_module_is_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "save" / "global_step1"
    folder.mkdir(parents=True)
    (tmp_path / "save" / "latest").write_text("global_step1\n")
    weights = torch.nn.Linear(3, 2).state_dict()
    state = {"module": weights, "buffer_names": [], "param_shapes": None, "optimizer": {}}
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    import_weights(tmp_path / "save", tmp_path / "out")
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


def refusal(source: Path) -> str:
    forget()
    with pytest.raises(CheckpointError) as refused:
        import_weights(source, source.parent / "out")
    assert not (source.parent / "out" / "model.safetensors").exists()
    line = str(refused.value)
    assert "\n" not in line
    return line


def test_what_does_not_add_up_is_one_line(tmp_path: Path) -> None:
    for stage in (2, 3):
        made = writer(tmp_path / f"whole{stage}", 3)
        made.write12(lean=True) if stage == 2 else made.write3(sub_group=2)

    def broken(stage: int, change: Callable[[Path], object]) -> str:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(tmp_path / f"whole{stage}", copy)
        change(copy / "global_step7")
        return refusal(copy)

    def optim(folder: Path, rank: int) -> Path:
        return folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    for stage in (2, 3):
        assert "written by 3 ranks" in broken(stage, lambda f: optim(f, 2).unlink())
        assert "the optim states of rank 1 are missing" in broken(
            stage, lambda f: optim(f, 1).unlink()
        )
        assert "cut by tensor parallelism" in broken(
            stage, lambda f: (f / "mp_rank_01_model_states.pt").write_bytes(b"")
        )
        assert "layers of a pipeline, or experts" in broken(
            stage, lambda f: (f / "layer_01-model_00-model_states.pt").write_bytes(b"")
        )
    assert "which are not there; try: copy those of all ranks" in broken(
        2, lambda f: [optim(f, rank).unlink() for rank in range(3)]
    )
    assert "holds no flat fp32 weights" in broken(
        2, lambda f: shutil.copy(f / "mp_rank_00_model_states.pt", optim(f, 0))
    )
    assert "no *_model_states.pt" in broken(
        2, lambda f: (f / "mp_rank_00_model_states.pt").unlink()
    )
    assert "elements by its shapes" in broken(2, lambda f: shutil.copy(optim(f, 2), optim(f, 0)))
    assert "stage 3 writes one of each" in broken(
        3, lambda f: (f / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()
    )
    for text in ("../whole2", "..", "/etc", "global_step8", ""):
        assert "which is no folder beside it" in broken(
            2, lambda f, text=text: (f.parent / "latest").write_text(text)
        )
