"""Find the checkpoint of a transformers model: its folder, and which tensors its files hold.

Nothing here imports transformers: if it is not imported, no model came from such a checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoal.base.attribute_patch import patch_attribute
from shoal.parallel.build.checkpoint_files import SMAPS, unmodified_mappings


def pretrained_class() -> type[Any] | None:
    """Return transformers' PreTrainedModel class; None if that module is not imported.

    transformers imports its submodules lazily, and this one takes two CPU seconds. A program that
    only uses the tokenizer does not need it.
    """
    models = sys.modules.get("transformers.modeling_utils")
    return getattr(models, "PreTrainedModel", None)


def checkpoint_folder(module: nn.Module) -> Path | None:
    """Return the folder of the safetensors that a model, or a part of one, was loaded from."""
    kind = pretrained_class()
    if kind is None:
        return None
    for part in module.modules():
        if isinstance(part, kind) and part.name_or_path:
            folder = Path(part.name_or_path)
            if next(folder.glob("*.safetensors"), None) is not None:
                return folder
    return None


def disable_kv_cache(module: nn.Module) -> Callable[[], None]:
    """Turn off the key-value cache that transformers models keep for generation; return the undo.

    It is on by default, in training too: a layer then writes into an object that it is passed, and
    its result depends on the number of calls.
    """
    found = {id(config): config for part in module.modules() for config in _cache_configs(part)}
    for config in found.values():
        config.use_cache = False

    def undo() -> None:
        for config in found.values():
            config.use_cache = True

    return undo


def _cache_configs(part: nn.Module) -> Iterator[Any]:
    config = getattr(part, "config", None)
    for one in (
        config,
        *(getattr(config, name, None) for name in getattr(config, "sub_configs", ())),
    ):
        if getattr(one, "use_cache", None) is True:
            yield one


@contextmanager
def pretrained_shapes() -> Iterator[None]:
    """Let transformers' own `from_pretrained` build models from their config, without weights.

    A context manager for the meta device, where transformers refuses to load. The caller has the
    weights already, and checks names, shapes and dtypes against them. Without transformers imported
    it does nothing. Arguments besides the config's own settings stay with the config.
    """
    if "transformers" not in sys.modules:
        yield
        return
    from transformers import PreTrainedModel

    def of_shapes(cls: Any, path: Any = None, *_: Any, config: Any = None, **more: Any) -> Any:
        told, dtype = more.pop("output_loading_info", False), more.pop("dtype", None)
        dtype = more.pop("torch_dtype", None) or dtype
        if config is None:
            config = cls.config_class.from_pretrained(path, **more)
        kept = {key: more[key] for key in more if key.endswith("_implementation")}
        kept |= {"dtype": getattr(config, "dtype", None) if dtype in (None, "auto") else dtype}
        model = cls._from_config(config, **kept).eval()
        return (model, {}) if told else model

    with patch_attribute(PreTrainedModel, "from_pretrained", classmethod(of_shapes)):
        yield


def converted_parameters(module: nn.Module, folder: Path) -> list[str]:
    """Return the names of parameters that are not in a folder's files as they are saved there.

    They were converted when they were read, or merged, or are no part of the checkpoint.
    """
    paths = {str(path.resolve()) for path in folder.glob("*.safetensors")}
    read = [one for one in unmodified_mappings() if one.path in paths]

    def lies_there(tensor: Tensor) -> bool:
        at = tensor.untyped_storage().data_ptr()
        return any(one.start <= at < one.stop for one in read)

    return [name for name, p in module.named_parameters() if p.numel() and not lies_there(p)]


def checkpoint_files_notice(module: nn.Module, folder: Path | None) -> list[str]:
    """Return a notice on a checkpoint of which not every process can read just its own part."""
    if folder is None or not SMAPS.exists():
        return []
    names = converted_parameters(module, folder)
    if not names:
        return []
    from shoal.base.text.units import bytes_text

    sizes = {n: p.numel() * p.element_size() for n, p in module.named_parameters()}
    made_bytes = sum(sizes[name] for name in names)
    return [
        f"model: {bytes_text(made_bytes)} of {bytes_text(sum(sizes.values()))} are not in the "
        f"files of {folder} as the model holds them (another format, merged, or missing), first: "
        f"{names[0]}; one process of each machine reads those whole, every process its part of the "
        f"rest; try: save_pretrained of the model as it is built"
    ]
