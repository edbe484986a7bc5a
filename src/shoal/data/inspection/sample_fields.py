"""Description of one sample as the model gets it: token ids with labels, or tensors by field.

    inputs     t0 t1 t2 | u0 u1      targets  t1 −  t3 | −  u2      of a packed row
    tokens     t0 t1 t2 t3           u0 u1 u2                       with the last target of each
    learnt      −  ✓  −  ✓            −  −  ✓                       document, which no input has

A token is learnt if its prediction has a loss: its target is not −100. The first token of a
document is no target. Pairs (inputs, targets) hold targets shifted by one, as the sources of Shoal
make them. A dict with `labels` holds them unshifted, as models of transformers take them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

IGNORED_LABEL = -100
MOST_VALUES = 8
"""Most elements of a tensor that a description lists one by one."""
SHADE_COLUMNS = 48
"""Most columns of an image that is drawn in letters."""


def split_joined(value: Any, count: int) -> list[Any] | None:
    """Split a joined micro-batch into its samples along dim 0.

    Args:
        value: result of the collate function, nested tuples, lists and dicts of tensors.
        count: number of samples.

    Returns:
        One value per sample; None if a tensor has another size in dim 0, as rows of a collate
        function that packs.
    """
    if isinstance(value, torch.Tensor | np.ndarray):
        return [value[n] for n in range(count)] if value.ndim and len(value) == count else None
    if isinstance(value, Mapping):
        columns = {key: split_joined(part, count) for key, part in value.items()}
        if any(column is None for column in columns.values()):
            return None
        return [{k: c[n] for k, c in columns.items() if c is not None} for n in range(count)]
    if isinstance(value, list | tuple):
        if value and all(isinstance(one, str | bytes) for one in value):
            return list(value) if len(value) == count else None
        parts = [split_joined(part, count) for part in value]
        if any(part is None for part in parts):
            return None
        return [tuple(part[n] for part in parts if part is not None) for n in range(count)]
    return None


def describe_sample(inputs: Any, targets: Any) -> dict[str, Any]:
    """Return a JSON description of one sample.

    Args:
        inputs, targets: of one sample, or the same dict twice for a batch that is one dict.

    Returns:
        `kind` "tokens": input_ids, labels, position_ids (None: a row is one document), and
        `shifted`: labels[t] is the label of the token after input t.
        `kind` "tensors": `fields`, one entry per tensor, number or text.
    """
    found = _find_tokens(inputs, targets)
    if found is not None:
        return {"kind": "tokens", **found}
    same = inputs is targets
    parts = [("", inputs)] if same else [("inputs", inputs), ("targets", targets)]
    return {"kind": "tensors", "fields": [f for name, part in parts for f in _fields(name, part)]}


def _find_tokens(inputs: Any, targets: Any) -> dict[str, Any] | None:
    """Return the ids of a sample of text; None if it is none."""
    is_dict = isinstance(inputs, Mapping)
    ids = _id_list(inputs.get("input_ids") if is_dict else inputs)
    if ids is None:
        return None
    one_dict = inputs is targets
    labels = _id_list(inputs.get("labels") if one_dict else targets)
    if not one_dict and (labels is None or len(labels) != len(ids)):
        return None
    positions = _id_list(inputs.get("position_ids")) if is_dict else None
    mask = _id_list(inputs.get("attention_mask")) if is_dict else None
    if mask is not None and (len(mask) != len(ids) or all(mask)):
        mask = None
    if positions is not None and len(positions) != len(ids):
        positions = None
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": positions,
        "attention_mask": mask,
        "shifted": not one_dict and not _has_unshifted_labels(ids, labels),
    }


def _has_unshifted_labels(ids: list[int], labels: list[int] | None) -> bool:
    """Return whether labels stand at the place of their own token, as transformers wants them."""
    pairs = [(i, label) for i, label in zip(ids, labels or (), strict=False) if label >= 0]
    if not pairs or any(i != label for i, label in pairs):
        return False
    after = zip(ids[1:], labels or (), strict=False)
    return not all(i == label for i, label in after if label >= 0)


def _id_list(value: Any) -> list[int] | None:
    """Return a row of integers as a list; None for any other value."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        value = torch.as_tensor(value.astype(np.int64))
    if not isinstance(value, torch.Tensor) or value.ndim != 1 or not len(value):
        return None
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        return None
    return value.tolist()


def mark_tokens(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tokens of a described sample in reading order.

    Args:
        row: result of `describe_sample` of kind "tokens".

    Returns:
        One {"id", "learnt", "document", "position", "label"} per token. `label` is the target at
        this input, −100 for none; None behind the last input. A document's last target is a token
        of its own, with `position` None.
    """
    ids, labels, positions = row["input_ids"], row["labels"], row["position_ids"]
    starts = [0, *(t for t in range(1, len(ids)) if positions and positions[t] == 0), len(ids)]
    tokens: list[dict[str, Any]] = []
    for document, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        for t in range(start, stop):
            learnt = False
            if labels is not None and t > start:
                learnt = labels[t - 1 if row["shifted"] else t] != IGNORED_LABEL
            tokens.append(
                {
                    "id": ids[t],
                    "learnt": learnt,
                    "document": document,
                    "position": positions[t] if positions else t,
                    "label": labels[t] if labels is not None else None,
                }
            )
        if row["shifted"] and labels is not None and labels[stop - 1] != IGNORED_LABEL:
            last = {"id": labels[stop - 1], "learnt": True, "document": document}
            tokens.append({**last, "position": None, "label": None})
    return tokens


def count_misplaced(row: Mapping[str, Any]) -> int:
    """Return how many labels are neither −100 nor the token that follows in their document."""
    if not row["shifted"]:
        return 0
    ids, labels, positions = row["input_ids"], row["labels"], row["position_ids"]
    return sum(
        labels[t] not in (IGNORED_LABEL, ids[t + 1])
        for t in range(len(ids) - 1)
        if not (positions and positions[t + 1] == 0)
    )


def count_padding(tokens: list[dict[str, Any]]) -> int:
    """Return how many equal tokens without a loss end a row, if they are two or more."""
    if not tokens:
        return 0
    count = 0
    for token in reversed(tokens):
        if token["learnt"] or token["id"] != tokens[-1]["id"]:
            break
        count += 1
    return count if 1 < count < len(tokens) else 0


def _fields(name: str, value: Any) -> list[dict[str, Any]]:
    """Return one entry per tensor, number or text of a nested value."""
    if isinstance(value, Mapping):
        return [f for k, part in value.items() for f in _fields(f"{name}.{k}".strip("."), part)]
    if isinstance(value, list | tuple):
        return [f for n, part in enumerate(value) for f in _fields(f"{name}[{n}]", part)]
    if isinstance(value, str | bytes):
        return [{"name": name, "dtype": type(value).__name__, "shape": [], "text": str(value)}]
    if isinstance(value, np.ndarray | np.generic):
        value = torch.as_tensor(value) if value.dtype.kind in "biufc" else repr(value)
    if isinstance(value, bool | int | float):
        value = torch.tensor(value)
    if not isinstance(value, torch.Tensor):
        return [{"name": name, "dtype": type(value).__name__, "shape": [], "text": repr(value)}]
    return [{"name": name, **_tensor_facts(value)}]


def _tensor_facts(tensor: torch.Tensor) -> dict[str, Any]:
    """Return dtype, shape, range and, of a small tensor, the values."""
    facts: dict[str, Any] = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
    }
    if not tensor.numel() or tensor.is_complex():
        return facts
    flat = tensor.detach().reshape(-1)
    numbers = flat.double()
    finite = numbers[numbers.isfinite()]
    if bad := numbers.numel() - finite.numel():
        facts["not_finite"] = bad
    if flat.numel() <= MOST_VALUES:
        facts["values"] = [_json_number(one) for one in flat.tolist()]
    elif finite.numel():
        facts |= {"least": finite.min().item(), "most": finite.max().item()}
        facts |= {"mean": finite.mean().item(), "std": finite.std(correction=0).item()}
        if not bad and (shades := shade_image(tensor.detach())):
            facts["shades"] = shades
    return facts


def shade_image(tensor: torch.Tensor) -> list[str]:
    """Return the brightness of an image as rows of figures 0 … 9, [] for other tensors.

    Args:
        tensor: floats [1 or 3, height, width] or [height, width], of 4 pixels or more a side.

    >>> shade_image(torch.eye(4))[0]
    '99000000'
    """
    if not tensor.is_floating_point():
        return []
    if tensor.ndim == 3 and tensor.shape[0] in (1, 3):
        tensor = tensor.mean(0)
    if tensor.ndim != 2 or min(tensor.shape) < 4:
        return []
    height, width = tensor.shape
    columns = min(2 * width, SHADE_COLUMNS)
    rows = max(1, round(columns / 2 * height / width))  # a letter is twice as high as wide
    if rows > SHADE_COLUMNS:
        return []
    small = nn.functional.adaptive_avg_pool2d(tensor.float()[None], (rows, columns))[0]
    least, most = small.min(), small.max()
    scaled = (small - least) / (most - least).clamp(min=1e-12) * 9
    return ["".join(str(int(one)) for one in row) for row in scaled.round().tolist()]


def _json_number(value: Any) -> Any:
    return value if not isinstance(value, float) or np.isfinite(value) else str(value)
