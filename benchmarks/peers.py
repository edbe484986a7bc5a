"""The programs that are timed against each other: each trains one model, one step per call.

    shoal              Shoal's own Llama and chunked loss through `shoal.parallelize`
    shoal_plain        the peers' plain model through `shoal.parallelize`: the engine alone
    ddp                a good loop by hand: DDP(model), fused AdamW, clip_grad_norm_, no_sync
    accelerate fabric  the same loop through Accelerate and Lightning Fabric, both on DDP
    shoal_zero1 shoal_zero2 shoal_fsdp   Shoal's Llama in these layouts; peers: sharded_peers.py
    *_compiled         a peer with torch.compile on the model; fsdp2_blocks: on every block
    shoal_blocks       Shoal's Llama in ddp with train.compile = blocks; shoal_fsdp_blocks: in fsdp;
                       …_residual: with precision.residual = bf16 too
    *_hf, *_hf_…       transformers' Llama of the same size: shoal_hf_blocks, accelerate_hf_compiled
    *_default          what each one's own quick start shows: no fused optimizer, no clipping, fp32

Every program gets the same initial weights and the same samples: this rank's share of a step,
tokens and targets, each [accumulate × micro_batch, seq]. Peers keep their losses as tensors (no
synchronisation, as a good loop does); Shoal returns the global loss and norm of every step.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from plain_llama import PlainLlama, mean_loss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shoal
from shoal.fabric import World
from shoal.models.llama import Llama

LR, CLIP = 3e-4, 1.0


@dataclass(frozen=True)
class Case:
    """What one table compares: sizes, precision (fp32, bf16), micro-batches per rank and step."""

    size: str
    arguments: dict[str, Any]
    precision: str
    micro_batch: int
    accumulate: int

    @property
    def name(self) -> str:
        """Short name for tables."""
        return f"{self.size}/{self.precision}/accumulate {self.accumulate}"


class Program:
    """One model in training; `losses` holds the mean loss of every step on this rank."""

    losses: list[Any]

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        """One optimizer step on this rank's samples."""
        raise NotImplementedError


class Shoal(Program):
    """`shoal.parallelize`, with Shoal's Llama or the plain one."""

    def __init__(
        self,
        case: Case,
        world: World,
        model: nn.Module,
        layout: str,
        compile: str,
        residual: str = "fp32",
    ) -> None:
        self.losses = []
        more = {} if residual == "fp32" else {"residual": residual}
        self.run = shoal.parallelize(
            model,
            lambda p: torch.optim.AdamW(p, lr=LR, fused=True),
            layout=layout,
            batch=case.micro_batch * case.accumulate * world.size,
            micro_batch=case.micro_batch,
            precision=case.precision,
            clip=CLIP,
            compile=compile,
            world=world,
            **more,
        )

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        self.losses.append(self.run.step((tokens, targets)).loss)


class HandWritten(Program):
    """A loop over torch's DistributedDataParallel."""

    def __init__(self, case: Case, model: nn.Module, *, tuned: bool) -> None:
        self.losses = []
        self.case, self.tuned = case, tuned
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=tuned or None)

    def _autocast(self) -> Any:
        bf16 = self.case.precision == "bf16"
        return torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext()

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        parts = list(
            zip(
                tokens.split(self.case.micro_batch),
                targets.split(self.case.micro_batch),
                strict=True,
            )
        )
        kept = []
        for place, (x, y) in enumerate(parts):
            last = place == len(parts) - 1
            with nullcontext() if last else self.model.no_sync():
                with self._autocast():
                    loss = mean_loss(self.model(x), y) / len(parts)
                loss.backward()
            kept.append(loss.detach())
        if self.tuned:
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(sum(kept))


class Accelerate(Program):
    """The loop of Accelerate's documentation; compiled: by its plugin, which compiles the whole."""

    def __init__(
        self, case: Case, model: nn.Module, *, tuned: bool, compiled: bool = False
    ) -> None:
        from accelerate import Accelerator

        self.losses = []
        self.case, self.tuned = case, tuned
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision="bf16" if case.precision == "bf16" else "no",
            gradient_accumulation_steps=case.accumulate,
            dynamo_backend="inductor" if compiled else None,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=tuned or None)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if not isinstance(getattr(self.model, "_orig_mod", self.model), DistributedDataParallel):
            raise RuntimeError("Accelerate did not wrap the model in DDP")

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        kept = []
        for x, y in zip(
            tokens.split(self.case.micro_batch), targets.split(self.case.micro_batch), strict=True
        ):
            with self.accelerator.accumulate(self.model):
                with self.accelerator.autocast():
                    loss = mean_loss(logits_of(self.model(x)), y)
                self.accelerator.backward(loss)
                if self.tuned and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                self.optimizer.step()
                self.optimizer.zero_grad()
            kept.append(loss.detach())
        self.losses.append(sum(kept) / len(kept))


class Fabric(Program):
    """The loop of Lightning Fabric's documentation."""

    def __init__(self, case: Case, model: nn.Module, *, tuned: bool, processes: int) -> None:
        import lightning

        self.losses = []
        self.case, self.tuned = case, tuned
        self.fabric = lightning.Fabric(
            accelerator="cpu",
            devices=processes,
            strategy="ddp",
            precision="bf16-mixed" if case.precision == "bf16" else "32-true",
        )
        self.fabric.launch()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=tuned or None)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        kept = []
        parts = list(
            zip(
                tokens.split(self.case.micro_batch),
                targets.split(self.case.micro_batch),
                strict=True,
            )
        )
        for place, (x, y) in enumerate(parts):
            with self.fabric.no_backward_sync(self.model, enabled=place < len(parts) - 1):
                with self.fabric.autocast():
                    loss = mean_loss(self.model(x), y) / len(parts)
                self.fabric.backward(loss)
            kept.append(loss.detach())
        if self.tuned:
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(sum(kept))


def logits_of(outputs: Any) -> Tensor:
    """The logits of a plain model, or of one of transformers."""
    found: Tensor = getattr(outputs, "logits", outputs)
    return found


def transformers_llama(case: Case) -> nn.Module:
    """The case's Llama as transformers has it; its weights are the same for all programs."""
    import transformers

    of = case.arguments
    config = transformers.LlamaConfig(
        vocab_size=of["vocabulary"],
        hidden_size=of["dim"],
        intermediate_size=of["hidden"],
        num_hidden_layers=of["layers"],
        num_attention_heads=of["heads"],
        num_key_value_heads=of["kv_heads"],
        max_position_embeddings=of["sequence"],
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def make(name: str, case: Case, world: World, weights: dict[str, Tensor] | None = None) -> Program:
    """The program of that name; without `weights` each draws its own.

    Errors: ImportError if its library is not installed.
    """
    plain, foreign = name == "shoal_plain", "_hf" in name
    own = name.startswith("shoal") and not plain
    model: nn.Module
    if foreign:
        model = transformers_llama(case)
    else:
        model = Llama(**case.arguments) if own else PlainLlama(**case.arguments)
        if weights is not None:
            model.load_state_dict(weights)
    if own or plain:
        words = set(name.split("_")[1:])
        layout = "".join(words - {"twin", "plain", "blocks", "residual", "hf"}) or "ddp"
        compile = "blocks" if "blocks" in words else "none"
        residual = "bf16" if "residual" in words else "fp32"
        return Shoal(case, world, model, layout, compile, residual)
    if foreign:
        compiled = name.endswith("_compiled")
        return Accelerate(case, model, tuned=True, compiled=compiled)
    if name.endswith("_blocks"):
        for block in model.blocks:
            block.compile()
        name = name.removesuffix("_blocks")
    if name.endswith("_compiled"):
        model.compile()
        name = name.removesuffix("_compiled")
    if name.startswith(("fsdp2", "fabric_fsdp", "deepspeed")):
        return _sharded(name, case, model, world.size)
    tuned = not name.endswith("_default")
    peer = name.removesuffix("_default")
    if peer == "ddp":
        return HandWritten(case, model, tuned=tuned)
    if peer == "accelerate":
        return Accelerate(case, model, tuned=tuned)
    if peer == "fabric":
        return Fabric(case, model, tuned=tuned, processes=world.size)
    raise ValueError(f"{name}: no such program")


def _sharded(name: str, case: Case, model: nn.Module, processes: int) -> Program:
    import sharded_peers

    tuned = not name.endswith("_default")
    name = name.removesuffix("_default")
    if name == "fsdp2":
        return sharded_peers.Fsdp2(case, model, tuned=tuned)
    if name == "fabric_fsdp":
        return sharded_peers.FabricFsdp(case, model, processes, tuned=tuned)
    return sharded_peers.DeepSpeed(case, model, int(name[-1]), processes, tuned=tuned)
