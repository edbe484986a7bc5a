"""Models by name: the count by arithmetic is the module's, and mistakes get one clear line."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from shoal.base.errors import ConfigError
from shoal.forecast.models.model_facts import (
    FAMILIES,
    PUBLISHED,
    count_model_parameters,
    resolve_model,
)
from shoal.forecast.models.own_transformers import own_shape
from shoal.forecast.models.transformer_costs import transformer_facts
from shoal.models.catalog import MODELS, build
from shoal.models.loss import token_loss


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("llama", {}),
        ("llama", {"dim": 96, "heads": 6, "kv_heads": 3, "layers": 3, "tied": False}),
        ("gpt", {}),
        ("gpt", {"dim": 96, "heads": 6, "layers": 3, "hidden": 100, "tied": False, "sequence": 7}),
        ("moe", {}),
        ("moe", {"dim": 96, "heads": 6, "layers": 3, "experts": 5, "top_k": 3, "tied": False}),
        ("vit", {}),
        ("vit", {"image_size": 12, "patch": 3, "image_channels": 3, "classes": 7, "dim": 36}),
        ("mlp", {}),
        ("mlp", {"layers": 1, "hidden": 7, "classes": 3, "inputs": 12}),
        ("resnet", {}),
        ("resnet", {"width": 2, "blocks": 2, "image_channels": 3, "stages": 2}),
        *((name, {}) for name in PUBLISHED),
    ],
)
def test_count_is_the_modules(name: str, arguments: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = build(name, arguments)
    assert sum(p.numel() for p in model.parameters()) == count_model_parameters(name, arguments)


def test_published_counts() -> None:
    """As in the papers' checkpoints on the Hugging Face hub."""
    assert {name: count_model_parameters(name) for name in PUBLISHED} == {
        "llama-2-7b": 6_738_415_616,
        "llama-2-13b": 13_015_864_320,
        "llama-3-8b": 8_030_261_248,
        "llama-3-70b": 70_553_706_496,
        "gpt-2": 124_439_808,
        "gpt-2-medium": 354_823_168,
        "gpt-2-large": 774_030_080,
        "gpt-2-xl": 1_557_611_200,
        "mixtral-8x7b": 46_702_792_704,
        "vit-b": 86_567_656,
        "vit-l": 304_326_632,
    }


@pytest.mark.parametrize("name", ["gpt", "moe", "vit", "llama", *PUBLISHED])
def test_the_planner_counts_the_same(name: str) -> None:
    shape = own_shape(name)
    assert transformer_facts(shape, shape.positions or 64, 4).trainable == count_model_parameters(
        name
    )


def test_counting_needs_no_torch() -> None:
    code = (
        "import sys; from shoal.forecast.models.model_facts import count_model_parameters; count_model_parameters('llama');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_every_family_has_a_module() -> None:
    assert list(MODELS) == list(FAMILIES)


def test_demo_is_small_and_follows_the_data() -> None:
    demo = resolve_model("llama", {}, vocabulary=1000, sequence=128).arguments
    assert (demo["vocabulary"], demo["sequence"], demo["hidden"], demo["kv_heads"]) == (
        1000, 128, 704, 2,
    )  # fmt: skip
    assert resolve_model("llama").arguments["vocabulary"] == 2048
    assert 3e6 < count_model_parameters("llama") < 4e6
    assert (
        resolve_model("llama-3-8b", {"layers": 2}, vocabulary=2048).arguments["vocabulary"]
        == 128256
    )
    assert resolve_model("llama", {"dropout": 0}).arguments["dropout"] == 0.0


@pytest.mark.parametrize(
    ("name", "arguments", "line"),
    [
        ("llama", {"dmi": 8}, "model.dmi: no such argument of llama; try: model.dim"),
        ("mlp", {"zz": 8}, "model.zz: no such argument of mlp; it has inputs, hidden, layers, "
         "classes, dropout"),
        ("llama", {"dim": "wide"}, "model.dim = 'wide': needs a whole number, got text; "
         "default: 256"),
        ("llama", {"layers": 2.5}, "model.layers = 2.5: needs a whole number, got a fraction; "
         "default: 4"),
        ("llama", {"layers": True}, "model.layers = True: needs a whole number, got true or false; "
         "default: 4"),
        ("llama", {"hidden": "x"}, "model.hidden = 'x': needs a whole number, got text; left out: "
         "8/3 · dim, rounded up to 64"),
        ("llama", {"tied": 1}, "model.tied = 1: needs true or false; default: true"),
        ("llama", {"layers": 0}, "model.layers = 0: at least 1; try: model.layers=1"),
        ("llama", {"dropout": 1.5}, "model.dropout = 1.5: a share below 1; try: "
         "model.dropout=0.9"),
        ("llama", {"dropout": float("nan")}, "model.dropout = nan: at least 0; try: "
         "model.dropout=0"),
        ("llama", {"heads": 6, "kv_heads": 4, "dim": 96}, "model.kv_heads = 4: does not divide "
         "model.heads = 6; try: model.kv_heads=3"),
        ("llama", {"dim": 250}, "model.dim = 250: not divisible by model.heads = 4; try: "
         "model.dim=248"),
        ("llama", {"dim": 36, "heads": 12}, "model.dim = 36: gives an odd head size (rotary pairs) "
         "with model.heads = 12; try: model.dim=24"),
        ("llama", {"vocabulary": 100}, "model.vocabulary = 100: less than the 512 of the "
         "data; try: model.vocabulary=512"),
        ("llama", {"sequence": 16}, "model.sequence = 16: less than the 64 of data.sequence; "
         "try: model.sequence=64"),
        ("moe", {"experts": 4, "top_k": 5}, "model.top_k = 5: more than model.experts = 4; try:"
         " model.top_k=4"),
        ("moe", {"balance": -1.0}, "model.balance = -1.0: at least 0; try: "
         "model.balance=0"),
        ("gpt", {"dim": 250}, "model.dim = 250: not divisible by model.heads = 4; try: "
         "model.dim=248"),
        ("gpt", {"kv_heads": 2}, "model.kv_heads: no such argument of gpt; try: model.heads"),
        ("gpt", {"sequence": 16}, "model.sequence = 16: less than the 64 of data.sequence; "
         "try: model.sequence=64"),
        ("vit", {"patch": 3}, "model.patch = 3: does not divide model.image_size = 8; try:"
         " model.patch=2"),
        ("vit", {"dim": 30}, "model.dim = 30: not divisible by model.heads = 4; try: "
         "model.dim=28"),
        ("lama", {}, f"model.name = lama: not one of {', '.join([*FAMILIES, *PUBLISHED])}; "
         "try: model.name=llama; any other model: hf:PATH of a config.json, or "
         "model.build=pkg.mod:function"),
    ],
)  # fmt: skip
def test_mistakes_get_one_line(name: str, arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(name, arguments, vocabulary=512, sequence=64)
    assert str(caught.value) == line


@pytest.mark.parametrize("shape", [(5, 1, 8, 8), (5, 3, 32, 32)])
def test_resnet_takes_digits_and_colour_images(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = build("resnet", {"image_channels": shape[1], "channels": 4, "blocks": 2})
    logits = model(torch.randn(shape))
    total, count = token_loss(logits, torch.arange(5))
    total.backward()
    assert logits.shape == (5, 10)
    assert int(count) == 5
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_mlp_learns_a_rule() -> None:
    torch.manual_seed(0)
    model = build("mlp", {"hidden": 32, "classes": 2, "inputs": 16, "dropout": 0.1})
    images = torch.randn(64, 1, 4, 4)
    labels = (images.sum((1, 2, 3)) > 0).long()
    weights = list(model.parameters())
    losses = []
    for _ in range(60):
        total, count = token_loss(model(images), labels)
        gradients = torch.autograd.grad(total / count, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.sub_(gradient, alpha=0.5)
        losses.append(float(total.detach() / count))
    assert losses[-1] < 0.2 < losses[0]
