"""Read pickles as data: containers, inert tensors, and an inert record of everything else.

Pickle is a small program for a stack machine, and two of its instructions fetch any object of
Python by name and call it. This machine has no such instruction: a name becomes `PickledName`, two
strings, and a call of it becomes `InertObject`, which keeps the arguments. Only the names of
`TABLE` have a meaning; each has a function of this file, which makes a tuple, a dict or an inert
tensor. Nothing is imported, looked up or called by a name in a file.

    dict, list, tuple, str, numbers   as they are; a set is a list, an OrderedDict a dict
    a tensor                          StoredTensor: its storage's key, format, offset, size, strides
    anything else                     Record, read by `field`, `state` or `arguments`

Costs     linear in the file: nothing is copied that a file can name twice, keys of a dict are
          short, and no size that a file claims is reserved before its bytes are there
Refused   in one line: a cut file, a broken stack, extension codes, buffers from outside, keys that
          are long or no values, pickles of more than 256 MiB
Source    PEP 307, 3154, 574; the instructions as `pickletools` of Python 3.11 to 3.13 lists them.
          What torch writes: torch 2.13, `serialization.py` and `_utils.py`
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

from shoal.base.errors import shorten
from shoal.base.plans.tensor_shards import DTYPES
from shoal.checkpoint.foreign.inert_objects import (
    InertObject,
    InertTensor,
    PickledName,
    PickleRefused,
    StorageRef,
    is_shape,
)

LIMIT_BYTES = 1 << 28
"""Of one pickle: names and shapes of a million slices. An opcode may cost 100 times its byte."""

KEY_PARTS, KEY_LETTERS = 64, 4096
"""Values in one key of a dict, and letters of each: both are visited whenever it is looked up."""

ARGUMENTS = 8
"""Most arguments of a call in `TABLE`; a tensor's call has most."""


def read_pickle(data: bytes | memoryview, where: str) -> Any:
    """Read the value of a pickle, with inert records for all that is no container and no tensor.

    Args:
        where: prefix of every message.

    Raises:
        Refused: the pickle is cut, broken, or asks for what no weights need.
    """
    if len(data) > LIMIT_BYTES:
        raise PickleRefused(
            f"{where}: a pickle of {len(data)} bytes; at most {LIMIT_BYTES} are read"
        )
    machine = _PickleMachine()
    try:
        for opcode, argument, _ in pickletools.genops(bytes(data)):
            machine.run(opcode.name, argument)
    except PickleRefused as failure:
        raise PickleRefused(f"{where}: {failure}") from None
    except (ValueError, IndexError) as failure:
        why = "it takes from an empty stack" if isinstance(failure, IndexError) else str(failure)
        raise PickleRefused(
            f"{where}: is no whole pickle: {shorten(why)}; it was cut short, or is another kind of "
            f"file"
        ) from None
    return machine.result


class _PickleMachine:
    """Stack machine of one pickle: its stack, marks and memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under each mark
        self.memo: dict[int, Any] = {}
        self.result: Any = None

    def run(self, name: str, argument: Any) -> None:
        if name in VALUES:
            self.stack.append(argument)
        elif name in RUN:
            RUN[name](self, argument)
        else:
            raise PickleRefused(f"a pickle that asks for {name}, which no weights need")

    def pop(self) -> Any:
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items


VALUES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
    "BYTEARRAY8", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
}  # fmt: skip
"""Instructions that put their argument on the stack."""


def _push(value: Callable[[], Any]) -> Callable[[_PickleMachine, Any], None]:
    return lambda m, _: m.stack.append(value())


def _mark(m: _PickleMachine, _: Any) -> None:
    m.below.append(m.stack)
    m.stack = []


def _pop(m: _PickleMachine, _: Any) -> None:
    if m.stack:
        m.pop()
    else:
        m.pop_to_mark()


def _tuple_of(count: int) -> Callable[[_PickleMachine, Any], None]:
    def make(m: _PickleMachine, _: Any) -> None:
        items = tuple(m.stack[-count:])
        if len(items) < count:
            raise IndexError
        m.stack[-count:] = [items]

    return make


def _from_mark(make: Callable[[list[Any]], Any]) -> Callable[[_PickleMachine, Any], None]:
    def run(m: _PickleMachine, _: Any) -> None:
        items = m.pop_to_mark()
        m.stack.append(make(items))

    return run


def _dict(items: list[Any]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    _set_items(found, items)
    return found


def _append(target: Any, items: list[Any]) -> None:
    if isinstance(target, InertObject):
        target = target.items
    if not isinstance(target, list):
        raise PickleRefused("a pickle that appends to what is no list")
    target.extend(items)


def _set_items(target: Any, items: list[Any]) -> None:
    if len(items) % 2:
        raise PickleRefused("a pickle that sets a key without a value")
    pairs = zip(items[::2], items[1::2], strict=True)
    if isinstance(target, InertObject):
        target.pairs.extend(pairs)
    elif isinstance(target, dict):
        for key, value in pairs:
            _check_key(key)
            target[key] = value
    else:
        raise PickleRefused("a pickle that sets items of what is no dict")


def _check_key(key: Any) -> None:
    """Refuse a dict key that is slow to hash.

    Raises:
        Refused: the key takes long to hash, or is no plain value.
    """
    seen, left = 0, [key]
    while left:
        one = left.pop()
        seen += 1
        if seen > KEY_PARTS:
            raise PickleRefused(f"a key of a dict that holds more than {KEY_PARTS} values")
        if isinstance(one, tuple):
            left.extend(one[: KEY_PARTS + 1])
        elif isinstance(one, int) and one.bit_length() > 64:
            raise PickleRefused("a key of a dict that is a number of more than 64 bits")
        elif isinstance(one, str | bytes) and len(one) > KEY_LETTERS:
            raise PickleRefused(f"a key of a dict of more than {KEY_LETTERS} letters")
        elif isinstance(one, list | dict | bytearray):
            raise PickleRefused("a key of a dict that is no value")


def _call(of: Any, arguments: Any) -> Any:
    """Return the result of our function in `TABLE` for a call, else a `InertObject` of the call."""
    if not isinstance(arguments, tuple):
        raise PickleRefused("a pickle that calls something without a tuple of arguments")
    make = TABLE.get((of.module, of.name)) if isinstance(of, PickledName) else None
    if make is None or len(arguments) > ARGUMENTS:
        return InertObject(of, arguments)
    return make(*arguments)


def _reduce(m: _PickleMachine, _: Any) -> None:
    arguments, of = m.pop(), m.pop()
    m.stack.append(_call(of, arguments))


def _new_with_names(m: _PickleMachine, _: Any) -> None:
    named, arguments, of = m.pop(), m.pop(), m.pop()
    m.stack.append(_call(of, arguments) if named == {} else InertObject(of, (arguments, named)))


def _old_object(m: _PickleMachine, _: Any) -> None:
    of, *arguments = m.pop_to_mark()
    m.stack.append(_call(of, tuple(arguments)))


def _global(text: str) -> PickledName:
    module, _, name = text.partition(" ")
    return PickledName(module, name)


def _old_instance(m: _PickleMachine, argument: str) -> None:
    arguments = tuple(m.pop_to_mark())
    m.stack.append(_call(_global(argument), arguments))


def _stack_global(m: _PickleMachine, _: Any) -> None:
    name, module = m.pop(), m.pop()
    if not (isinstance(name, str) and isinstance(module, str)):
        raise PickleRefused("a pickle that asks for a name that is no text")
    m.stack.append(PickledName(module, name))


def _build(m: _PickleMachine, _: Any) -> None:
    state = m.pop()
    if isinstance(m.stack[-1], InertObject):  # attributes of a dict or a tensor are no weights
        m.stack[-1].state = state


def _put(m: _PickleMachine, place: int) -> None:
    m.memo[place] = m.stack[-1]


def _get(m: _PickleMachine, place: int) -> None:
    if place not in m.memo:
        raise PickleRefused("a pickle that takes back what it never kept")
    m.stack.append(m.memo[place])


def _persistent(m: _PickleMachine, _: Any) -> None:
    """Push a storage of a torch file: ("storage", kind, key, location, elements)."""
    told = m.pop()
    if not isinstance(told, tuple) or len(told) != 5 or told[0] != "storage":
        raise PickleRefused("a pickle that refers to what is no storage of tensors")
    _, kind, key, _, elements = told
    dtype = STORAGES.get((kind.module, kind.name)) if isinstance(kind, PickledName) else None
    if dtype is None or not isinstance(key, str) or not is_shape((elements,)):
        raise PickleRefused(f"a storage of the kind {shorten(str(kind))}, which is not known")
    m.stack.append(StorageRef(dtype, key, elements))


def _proto(m: _PickleMachine, version: int) -> None:
    if version > 5:
        raise PickleRefused(f"pickle protocol {version}; 5 is the newest that is read")


def _apply_to_top(act: Callable[[Any, list[Any]], None]) -> Callable[[_PickleMachine, Any], None]:
    def run(m: _PickleMachine, _: Any) -> None:
        items = m.pop_to_mark()
        act(m.stack[-1], items)

    return run


def _append_one(m: _PickleMachine, _: Any) -> None:
    item = m.pop()
    _append(m.stack[-1], [item])


def _set_one_item(m: _PickleMachine, _: Any) -> None:
    value, key = m.pop(), m.pop()
    _set_items(m.stack[-1], [key, value])


def _stop(m: _PickleMachine, _: Any) -> None:
    m.result = m.pop()


RUN: dict[str, Callable[[_PickleMachine, Any], object]] = {
    "PROTO": _proto, "FRAME": lambda m, _: None, "STOP": _stop,
    "NONE": _push(lambda: None), "NEWTRUE": _push(lambda: True), "NEWFALSE": _push(lambda: False),
    "EMPTY_TUPLE": _push(tuple), "EMPTY_LIST": _push(list), "EMPTY_DICT": _push(dict),
    "EMPTY_SET": _push(list),  # a list: values of a file are not hashed
    "MARK": _mark, "POP": _pop, "POP_MARK": lambda m, _: m.pop_to_mark(),
    "DUP": lambda m, _: m.stack.append(m.stack[-1]),
    "TUPLE": _from_mark(tuple), "LIST": _from_mark(list), "FROZENSET": _from_mark(list),
    "DICT": _from_mark(_dict), "TUPLE1": _tuple_of(1), "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3), "APPEND": _append_one, "APPENDS": _apply_to_top(_append),
    "ADDITEMS": _apply_to_top(_append), "SETITEM": _set_one_item,
    "SETITEMS": _apply_to_top(_set_items),
    "GLOBAL": lambda m, argument: m.stack.append(_global(argument)), "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce, "NEWOBJ": _reduce, "NEWOBJ_EX": _new_with_names, "BUILD": _build,
    "OBJ": _old_object, "INST": _old_instance, "BINPERSID": _persistent,
    "PUT": _put, "BINPUT": _put, "LONG_BINPUT": _put,
    "MEMOIZE": lambda m, _: _put(m, len(m.memo)),
    "GET": _get, "BINGET": _get, "LONG_BINGET": _get,
}  # fmt: skip
"""Instructions with a function. Refused: EXT1 to EXT4, PERSID, NEXT_BUFFER, …"""


def _ordered_dict(*arguments: Any) -> Any:
    return InertObject(PickledName("collections", "OrderedDict"), arguments) if arguments else {}


def _size(*arguments: Any) -> Any:
    if len(arguments) != 1 or not is_shape(arguments[0]):
        raise PickleRefused("a shape that is no short tuple of whole numbers")
    return arguments[0]


def _tensor(dtype: str | None, *told: Any) -> InertTensor:
    """Return a tensor from torch's arguments: storage, offset, size, stride, gradient and hooks."""
    if not 6 <= len(told) <= 7 or not isinstance(told[0], StorageRef):
        raise PickleRefused("a tensor without a storage")
    storage, offset, size, stride = told[:4]
    if not (
        is_shape((offset,)) and is_shape(size) and is_shape(stride) and len(size) == len(stride)
    ):
        raise PickleRefused("a tensor whose size and strides are no short tuples of whole numbers")
    if len(told) == 7 and told[6]:
        raise PickleRefused(
            "a tensor that is stored conjugated or negated; try: save tensor.clone()"
        )
    return InertTensor(storage, dtype or storage.dtype, offset, size, stride)


def _tensor_v3(*told: Any) -> InertTensor:
    kind = told[6] if len(told) > 6 else None
    if not (isinstance(kind, PickledName) and kind.module == "torch" and kind.name in DTYPES):
        raise PickleRefused(f"a tensor of the format {shorten(str(kind))}, which is not known")
    return _tensor(kind.name, *told[:6], *told[7:])


def _parameter(*told: Any) -> Any:
    data = told[0] if told else None
    return data if isinstance(data, InertTensor) else InertObject(PARAMETER, told)


def _with_attributes(*told: Any) -> Any:
    """Return the tensor inside one that carries Python attributes, if it is a plain one."""
    made, kind, arguments = (*told, None, None, None)[:3]
    if (
        kind in (PickledName("torch", "Tensor"), PARAMETER)
        and made in TENSORS
        and isinstance(arguments, tuple)
    ):
        return _call(made, arguments)
    return InertObject(PickledName("torch._tensor", "_rebuild_from_type_v2"), told)


PARAMETER = PickledName("torch.nn.parameter", "Parameter")
TENSORS = tuple(PickledName("torch._utils", f"_rebuild_tensor_v{version}") for version in (2, 3))

TABLE: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): _ordered_dict,
    ("torch", "Size"): _size,
    ("torch._utils", "_rebuild_tensor_v2"): lambda *told: _tensor(None, *told),
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _with_attributes,
}
"""(module, name) → the function of this file for a call of it. No other object is made."""

STORAGES = {
    ("torch", "DoubleStorage"): "float64", ("torch", "FloatStorage"): "float32",
    ("torch", "HalfStorage"): "float16", ("torch", "BFloat16Storage"): "bfloat16",
    ("torch", "LongStorage"): "int64", ("torch", "IntStorage"): "int32",
    ("torch", "ShortStorage"): "int16", ("torch", "CharStorage"): "int8",
    ("torch", "ByteStorage"): "uint8", ("torch", "BoolStorage"): "bool",
    ("torch", "ComplexFloatStorage"): "complex64",
    ("torch.storage", "UntypedStorage"): "uint8", ("torch", "UntypedStorage"): "uint8",
}  # fmt: skip
"""(module, name) of a storage class → torch's name of its dtype."""
