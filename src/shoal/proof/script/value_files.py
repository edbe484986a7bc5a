"""Files of a record: nested values as JSON and safetensors, without pickles.

    (inputs, targets)   →  N.json         ["tuple", [["tensor", 0], ["tensor", 1]]]
                           N.safetensors  "0", "1"

Tensors, arrays, numbers, texts, and tuples, lists, dicts, named tuples and dataclasses of them are
kept. A class of the script's own is found again by its name, since both runs import it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from shoal.proof.script.script_end import UnrecordableError


def write_values(path: Path, values: Sequence[Any]) -> list[str]:
    """Write values to `path`.json and `path`.safetensors; return a digest of each.

    Raises:
        UnrecordableError: a value holds another object.
    """
    tensors: list[torch.Tensor] = []
    described, digests = [], []
    for value in values:
        first = len(tensors)
        told = _describe(value, tensors)
        described.append(told)
        digests.append(_digest(told, tensors[first:]))
    write_tensors(path.with_suffix(".safetensors"), {str(n): one for n, one in enumerate(tensors)})
    path.with_suffix(".json").write_text(json.dumps(described), encoding="utf-8")
    return digests


def read_values(path: Path) -> list[Any]:
    """Read the values that `write_values` wrote."""
    tensors = load_file(path.with_suffix(".safetensors"))
    described = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    return [_rebuild(one, tensors) for one in described]


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors by name, each whole: views and tied tensors are copied."""
    save_file({name: _storable(one) for name, one in tensors.items()}, path)


def digest_value(value: Any) -> str:
    """Return a digest of a value: equal values have equal ones.

    Raises:
        UnrecordableError: the value holds another object.
    """
    tensors: list[torch.Tensor] = []
    return _digest(_describe(value, tensors), tensors)


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.detach().cpu()
    if whole.is_complex():
        whole = torch.view_as_real(whole)
    return whole.contiguous().clone()


def _digest(described: Any, tensors: Sequence[torch.Tensor]) -> str:
    found = hashlib.sha256(json.dumps(described).encode())
    for tensor in tensors:
        found.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        found.update(_storable(tensor).reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _describe(value: Any, tensors: list[torch.Tensor]) -> list[Any]:
    """Return a value as JSON, in which tensors are numbers of `tensors`."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise UnrecordableError(f"a tensor of layout {value.layout}")
        tensors.append(value)
        return ["complex" if value.is_complex() else "tensor", len(tensors) - 1]
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        tensors.append(torch.from_numpy(np.ascontiguousarray(value)))
        return ["array", len(tensors) - 1]
    if isinstance(value, np.generic):
        return ["plain", value.item()]
    if value is None or isinstance(value, str | bool | int | float):
        return ["plain", value]
    if type(value) in (tuple, list):
        return [type(value).__name__, [_describe(one, tensors) for one in value]]
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ["named tuple", name, [_describe(one, tensors) for one in value]]
    if isinstance(value, Mapping):
        pairs = [[_describe(k, tensors), _describe(v, tensors)] for k, v in value.items()]
        return ["dict" if type(value) is dict else "mapping", name, pairs]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _describe(getattr(value, f.name), tensors) for f in _fields(value)}
        return ["dataclass", name, fields]
    raise UnrecordableError(f"a {type(value).__name__}")


def _fields(value: Any) -> list[dataclasses.Field[Any]]:
    return [one for one in dataclasses.fields(value) if one.init]


def _rebuild(described: list[Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    """Rebuild a value from its description; a tensor is a copy of its own."""
    kind, content = described[0], described[-1]
    if kind == "tensor":
        return tensors[str(content)].clone()
    if kind == "complex":
        return torch.view_as_complex(tensors[str(content)].clone())
    if kind == "array":
        return tensors[str(content)].clone().numpy()
    if kind == "plain":
        return content
    if kind in ("tuple", "list", "named tuple"):
        parts = [_rebuild(one, tensors) for one in content]
        if kind == "named tuple":
            return _find_class(described[1])(*parts)
        return tuple(parts) if kind == "tuple" else parts
    if kind == "dataclass":
        fields = {name: _rebuild(one, tensors) for name, one in content.items()}
        return _find_class(described[1])(**fields)
    pairs = {_rebuild(k, tensors): _rebuild(v, tensors) for k, v in content}
    return pairs if kind == "dict" else _find_class(described[1])(pairs)


def _find_class(name: str) -> Any:
    """Return a class by its module, which both runs import, and its name."""
    module, _, path = name.partition(":")
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = getattr(found, part)
    return found
