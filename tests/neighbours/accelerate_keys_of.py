"""Lists the keys that Accelerate's configuration file may have, by Accelerate's own code.

.venv-proof/bin/python tests/neighbours/accelerate_keys_of.py  writes accelerate_documented.json
"""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import version
from pathlib import Path

OUT = Path(__file__).with_name("accelerate_documented.json")
GROUPS = {
    "DeepSpeed Arguments": ("deepspeed_config", ""),
    "FSDP Arguments": ("fsdp_config", "fsdp_"),
    "Megatron-LM Arguments": ("megatron_lm_config", "megatron_lm_"),
    "FP8 Arguments": ("fp8_config", "fp8_"),
    "ParallelismConfig Arguments": ("parallelism_config", "parallelism_config_"),
    "MPI Arguments": ("mpirun_config", ""),
    "Resource Selection Arguments": ("dynamo_config", "dynamo_"),
}
"""Groups of `accelerate launch`'s arguments → the block of the file that they are copied from."""


def keys() -> list[str]:
    """Fields of its dataclass, and for each block the arguments that take its keys."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    found = {field.name for field in dataclasses.fields(ClusterConfig)}
    for group in launch_command_parser()._action_groups:
        block, prefix = GROUPS.get(str(group.title), ("", ""))
        if block:
            names = [action.dest for action in group._group_actions]
            found |= {f"{block}.{name}" for name in names if name.startswith(prefix)}
    return sorted(found)


if __name__ == "__main__":
    told = {"accelerate": version("accelerate"), "keys": keys()}
    OUT.write_text(json.dumps(told, indent=0) + "\n")
