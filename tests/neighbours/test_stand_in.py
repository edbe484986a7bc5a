"""What scripts of the neighbours' repositories lean on beyond the printed calls, in two programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DEEPSPEED = """
import importlib.metadata, importlib.util, sys
import shoal.neighbours.deepspeed
import deepspeed
import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.pipe import PipelineModule
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

def refused(call):
    try:
        call()
    except Exception as failure:
        return str(failure)

print(refused(lambda: PipelineModule(layers=[])))
print(refused(lambda: type("Mine", (PipelineModule,), {})))
print(refused(lambda: split_params_into_different_moe_groups_for_optimizer({})))
print(refused(lambda: deepspeed.runtime.zero.offload_config.OffloadDeviceEnum.cpu))
print(refused(lambda: list(deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum)))
print(hasattr(deepspeed, "__wrapped__"), importlib.util.find_spec("deepspeed"))

deepspeed.init_distributed()
print(dist.get_rank(), comm.get_world_size(), deepspeed.get_accelerator().device_name())

def losses(direct):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={"train_batch_size": 8, "gradient_accumulation_steps": 2,
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    )
    found = []
    for step in range(6):
        loss = engine(torch.ones(4, 4) + step).square().mean()
        loss.backward() if direct else engine.backward(loss)
        engine.step()
        found.append(loss.item())
    print(refused(lambda: engine.train_batch()), hasattr(engine, "random_ltd_scheduler"))
    return found

print(losses(True) == losses(False))

model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
before = model.weight.detach().clone()
config = {"train_batch_size": 1, "gradient_clipping": 0,
          "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
engine, rival = (
    deepspeed.initialize(model=one, model_parameters=one.parameters(), config=config)[0]
    for one in (model, other)
)
engine.backward(engine(torch.ones(1, 2)).mean())
engine.backward(engine(torch.ones(1, 2) * 3).mean())
engine.step()
print((before - engine.module_state_dict()["weight"]).round(decimals=5).tolist())

aside = torch.ones(2, requires_grad=True)
aside.sum().backward()
print(aside.grad.tolist(), torch.ones(2).to("cuda:0").device, torch.ones(2).to(torch.float64).dtype)

cuda = torch.device("cuda", 0)
with torch.device("meta"):
    assert torch.zeros(2).device.type == "meta"
full = torch.full((2,), 7.0, device=cuda)
print(full.device, full.tolist(), torch.randn(1, device="cuda").device, torch.tensor(1.0, device=cuda).item(), full.to(torch.cuda.current_device()).device)

from deepspeed.comm import mori
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.lr_schedules import WarmupLR
held = deepspeed.get_accelerator()
engine = deepspeed.initialize(model=torch.nn.Linear(2, 1), config={"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}})[0]
assert not mori.is_enabled() and held.on_accelerator(full)
print(held.device_count(), held.is_bf16_supported(), held.is_available(), engine.train_batch_size(), engine.gradient_accumulation_steps(), engine.get_lr()[0])
adam = DeepSpeedCPUAdam(engine.module.parameters(), 0.05, True, (0.8, 0.9))
assert (type(adam), adam.defaults["betas"], adam.defaults["weight_decay"]) == (torch.optim.AdamW, (0.8, 0.9), 0.0)
assert type(FusedAdam(engine.module.parameters(), adam_w_mode=False)) is torch.optim.Adam
schedule, rates = WarmupLR(adam, 0.0, 0.05, 2, "linear"), []
for _ in range(3):
    rates.append(schedule.get_last_lr()[0]); schedule.step(); schedule.step()
leaf = torch.ones(2, requires_grad=True)
deepspeed.checkpointing.checkpoint(lambda x: x.square(), leaf * 2).sum().backward()
print(rates, (leaf.grad / 2).tolist())
print(refused(lambda: deepspeed.initialize(model=torch.nn.Linear(2, 1), config={"train_batch_size": 1, "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}}})))
print(refused(lambda: engine.offload_states()))
torch.set_default_dtype(torch.bfloat16)
for how in ({}, {"bf16": {"enabled": True}}):
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 1, **how}):
        print(torch.nn.Linear(2, 1).weight.dtype, torch.arange(2).dtype)
torch.set_default_dtype(torch.float32)
print(torch.nn.Linear(2, 1).weight.dtype, torch.empty.__name__)
"""
ACCELERATE = """
import shoal.neighbours.accelerate
import accelerate
import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.commands.launch import set_seed
from accelerate.local_sgd import LocalSGD
from accelerate.logging import get_logger
from accelerate.utils import (
    DDPCommunicationHookType as Hook, DistributedDataParallelKwargs, ProfileKwargs, find_executable_batch_size, is_xpu_available,
)

def refused(call):
    try:
        call()
    except Exception as failure:
        return str(failure)

print(refused(accelerate.utils.DummyOptim))
print(refused(lambda: DistributedDataParallelKwargs(comm_hook=Hook("fp16"))))
print(is_xpu_available(), PartialState().process_index)
accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=Hook.NO), ProfileKwargs(activities=["cpu"])])
print(accelerator.distributed_type == DistributedType.NO, accelerator.check_trigger())
accelerator.set_trigger()
print(accelerator.check_trigger(), accelerator.check_trigger())
print(refused(lambda: accelerator.prepare_pippy), hasattr(accelerator, "prepare_pippy"))

sizes = []

@find_executable_batch_size(starting_batch_size=10)
def train(batch_size):
    sizes.append(batch_size)
    if batch_size > 8:
        raise RuntimeError("CUDA out of memory.")

train()
print(sizes)
with accelerator.split_between_processes([1, 2, 3]) as mine:
    print(mine)
with accelerator.profile() as seen:
    torch.ones(2).sum()
print("aten::sum" in seen.key_averages().table())
get_logger("mine").warning("said %d", 1, main_process_only=False)

from accelerate.utils.deepspeed import HfDeepSpeedConfig
print(refused(type("Transformers", (HfDeepSpeedConfig,), {})))
print(set_seed is accelerate.utils.random.set_seed)
"""


def _lines(programs: Any, folder: Path, text: str) -> tuple[list[str], str]:
    (folder / "mine.py").write_text(text)
    ended = programs.run("mine.py", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines(), ended.stderr


def test_what_deepspeeds_scripts_lean_on(programs: Any, tmp_path: Path) -> None:
    found, said = _lines(programs, tmp_path, DEEPSPEED)
    pipe = "deepspeed.pipe.PipelineModule is not answered by Shoal; try: the module as it is"
    assert found[0].startswith(pipe)
    assert found[1].startswith(pipe), "a class that inherits from it"
    assert "split_params_into_different_moe_groups_for_optimizer is not answered" in found[2]
    assert "OffloadDeviceEnum is not answered" in found[3] or "offload_config" in found[3]
    assert "OffloadStateTypeEnum is not answered" in found[4] or "offload_config" in found[4]
    assert found[5] == "False None", "is it installed: as without us"
    assert found[6] == "0 1 cpu", "one process has a group, too"
    lacks = "deepspeed: engine.train_batch is not answered by Shoal; try: engine(batch), "
    lacks += "backward and step False"
    assert found[7:10] == [lacks, lacks, "True"], "loss.backward() is the engine's"
    assert found[10] == "[[2.0, 2.0]]", "of two engines, one takes two losses in a step"
    assert found[11] == "[1.0, 1.0] cpu torch.float64"
    assert found[12] == "cpu [7.0, 7.0] cpu 1.0 cpu", "made on a device that is not here"
    assert found[13] == "1 True True 8 1 0.1", "what engine and accelerator tell"
    assert found[14] == "[0.0, 0.025, 0.05] [4.0, 4.0]", "a schedule made by hand, recompute"
    assert "one-bit:STEPS" in found[15]
    assert found[17] == "torch.float32 torch.int64", (
        "made under zero.Init, of an fp32 configuration"
    )
    assert found[18] == "torch.bfloat16 torch.int64"
    assert found[19] == "torch.float32 empty"
    assert found[16].endswith('try: "zero_optimization": {"offload_optimizer": {"device": "cpu"}}')
    assert said.count("no CUDA device is here") == 1


def test_what_accelerates_scripts_lean_on(programs: Any, tmp_path: Path) -> None:
    found, said = _lines(programs, tmp_path, ACCELERATE)
    assert found[0].startswith("accelerate.utils.DummyOptim is not answered by Shoal; try:")
    assert "comm_hook" in found[1]
    assert found[2:7] == [
        "False 0",
        "True False",
        "True False",
        "Accelerator.prepare_pippy is not answered by Shoal; try: shoal.parallelize(…, "
        'layout="pp", sample=…) False',
        "[10, 9, 8]",
    ]
    assert found[7:9] == ["[1, 2, 3]", "True"]
    assert found[9].startswith("accelerate.utils.deepspeed.HfDeepSpeedConfig is not answered")
    assert found[10] == "True", "whichever module a name is looked for in"
    assert "said 1" in said
