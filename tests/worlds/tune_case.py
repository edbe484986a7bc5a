"""Adapters of peft on tiny models of transformers, in a world: what trains, and what ranks hold."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from export_case import family
from own_passes_case import end
from shoal.fabric import World
from shoal.parallel.build.full_state import local_state
from shoal.trainer.parallelize import parallelize
from shoal.trainer.run import Run

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parallel"))

from hf_families import TOKENS, VOCABULARY

SAMPLES, BATCH, MICRO_BATCH, STEPS = 24, 8, 2, 3
IGNORED = -100
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"]
TARGETS = {
    **dict.fromkeys(("llama", "llama tied"), LINEAR),
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "gpt-neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
}
"""The layers that get an adapter: all matrices of a block."""


def plain(name: str) -> nn.Module:
    """The model beneath, without dropout: layouts cut other micro-batches."""
    torch.manual_seed(0)
    made = family(name).build()
    for part in made.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return made


def build(name: str, adapter: str) -> nn.Module:
    """The model of a family with adapters that already do something."""
    from peft import LoraConfig, get_peft_model

    made = plain(name)
    if adapter:
        made = get_peft_model(
            made,
            LoraConfig(
                r=4,
                lora_alpha=8,
                target_modules=TARGETS[name],
                use_dora=adapter == "dora",
                init_lora_weights=False,  # B of zeros would give A no gradient
                task_type="CAUSAL_LM",
                **({"fan_in_fan_out": True} if name == "gpt2" else {}),
            ),
        )
    return made.double()


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and targets, of which unlike many count: some samples have none."""
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, VOCABULARY, (SAMPLES, TOKENS + 1), generator=drawn)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=drawn) < 0.5] = IGNORED
    targets[3] = IGNORED
    return list(zip(tokens[:, :-1], targets, strict=True))


def loss(outputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = outputs["logits"].flatten(0, 1)
    summed = functional.cross_entropy(
        logits, targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return summed, (targets != IGNORED).sum()


def seeing() -> nn.Module:
    """A LLaVA whose vision tower is frozen: a projector and a language model train."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers import LlavaForConditionalGeneration as Llava

    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        image_size=16, patch_size=8, projection_dim=32,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=40, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=1, image_seq_length=4
    )
    model = Llava(config)
    model.model.vision_tower.requires_grad_(False)
    return model.double()


def seen() -> list[Any]:
    """Images, each as four places at the front of its tokens, and targets behind them."""
    drawn = torch.Generator().manual_seed(2)
    images = torch.randn(SAMPLES, 3, 16, 16, generator=drawn, dtype=torch.float64)
    places = torch.ones(4, dtype=torch.long)
    return [
        (
            {"input_ids": torch.cat((places, tokens)), "pixel_values": image},
            torch.cat((IGNORED * places, targets)),
        )
        for image, (tokens, targets) in zip(images, samples(), strict=True)
    ]


def opened(world: World, model: nn.Module, layout: Any, **settings: Any) -> Run:
    data = seen() if "call" in settings else samples()
    return parallelize(
        model,
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2),
        loss,
        layout,
        batch=BATCH,
        micro_batch=MICRO_BATCH,
        precision="fp64",
        clip=0.5,
        sample=torch.utils.data.default_collate(data[:2]),
        world=world,
        **settings,
    )


def trained(world: World, name: str, adapter: str, layout: Any) -> dict[str, Any]:
    """Losses, trained weights, the share of the base that this rank holds, and bytes of states."""
    torch.set_num_threads(1)
    if name == "llava":
        run, data = opened(world, seeing(), layout, call="kwargs"), seen()
    else:
        run, data = opened(world, build(name, adapter), layout), samples()
    losses: list[float] = []
    for batch in run.loader(data):
        losses.append(run.step(batch).loss)
        if len(losses) == STEPS:
            break
    rows = {row.name: row for row in run.program.plan.placements if not row.is_buffer}
    mine = {n: shard.elements for n, (_, shard) in local_state(run.program).items()}
    whole = run.state_dict()
    weights = {n: t for n, t in whole.items() if n in rows and rows[n].trains}
    found = {
        "losses": losses,
        "weights": {n: t.flatten()[:: max(1, t.numel() // 8)].tolist() for n, t in weights.items()},
        "split": sorted(n for n, row in rows.items() if row.cut is not None),
        "whole": sorted(n for n, row in rows.items() if row.cut is None and len(row.shape) > 1),
        "held": sum(mine.values()),
        "of": sum(row.elements for row in rows.values()),
        "trained": sum(row.elements for row in rows.values() if row.trains),
        "states": sum(
            t.numel() for kept in run.optimizer.state.values() for t in kept.values() if t.dim()
        ),
    }
    end(run)
    return found


def exported(world: World, name: str, adapter: str, layout: Any, folder: str) -> dict[str, Any]:
    """Train, save, export the adapter and the merged model, open both; how far logits are off."""
    torch.set_num_threads(1)
    run = opened(world, build(name, adapter), layout, folder=Path(folder) / "run")
    for batch in run.loader(samples()):
        run.step(batch)
    saved, weights = run.save(), run.state_dict()
    told: dict[str, Any] = {}
    if world.is_first:
        assert saved is not None
        told = reopened(name, adapter, saved, Path(folder), weights)
    end(run)
    if run.lease is not None:
        run.lease.release()
    world.barrier()
    return told


@torch.no_grad()
def reopened(
    name: str, adapter: str, saved: Path, folder: Path, weights: dict[str, torch.Tensor]
) -> dict[str, Any]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from shoal.checkpoint.export.export_adapter import export_adapter
    from shoal.checkpoint.export.export_folder import export_folder
    from shoal.trainer.merge_adapter import merge_adapters

    tokens = torch.stack([row for row, _ in samples()[:4]])
    trained_model = build(name, adapter).eval()
    trained_model.load_state_dict(weights)
    wanted = trained_model(tokens).logits
    for _ in range(2):  # the second takes the place of an earlier export
        files = export_adapter(saved, folder / "adapter").files
        export_folder(saved, folder / "whole", merged=merge_adapters(saved))
    found = PeftModel.from_pretrained(plain(name).double(), folder / "adapter").double().eval()
    whole, loading = AutoModelForCausalLM.from_pretrained(
        folder / "whole", output_loading_info=True
    )
    off = {
        "untrained": plain(name).double().eval()(tokens).logits,
        "adapter": found(tokens).logits,
        "merged": whole.eval()(tokens).logits,
    }
    return {
        "files": list(files),
        "loading": {key: sorted(map(str, value)) for key, value in loading.items() if value},
        **{key: float((logits - wanted).abs().max()) for key, logits in off.items()},
    }
