"""Pickles are read as data: hostile ones run nothing, and bombs cost no more than their bytes."""

from __future__ import annotations

import ast
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import time
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_pickles import call, hostile, name, text, tuple_, whole

from shoal.base.errors import CheckpointError
from shoal.checkpoint.foreign import pickle_reader
from shoal.checkpoint.foreign.inert_objects import (
    InertObject,
    InertTensor,
    PickledName,
    PickleRefused,
)
from shoal.checkpoint.foreign.pickle_reader import KEY_LETTERS, TABLE, read_pickle
from shoal.checkpoint.foreign.torch_file import TorchFile, map_file

PROGRAM = Path(__file__).parent / "hostile_pickles.py"


def read_all(folder: Path, reader: str) -> dict[str, Any]:
    folder.mkdir()
    command = [sys.executable, str(PROGRAM), str(folder), reader]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_runs_under_python_is_inert_here(tmp_path: Path) -> None:
    """Every canary appears under Python's unpickler, none under ours, which imports nothing."""
    control = read_all(tmp_path / "python", "python-alone")
    assert control["ran"] == list(control["said"])
    assert len(control["ran"]) >= 20
    assert {"os.system", "subprocess.Popen", "import", "pickle.find_class"} <= {*control["heard"]}
    ours = read_all(tmp_path / "shoal", "shoal")
    assert list(ours["said"]) == list(hostile(tmp_path))
    assert ours["ran"] == []
    assert ours["heard"] == []  # not an import, not an open, not a look-up
    for what, said in ours["said"].items():
        assert "record of" in said or "<record>" in said or said == "None" or "Refused" in said
        assert "\n" not in said, what


@pytest.mark.proof
def test_those_of_other_libraries_run_under_python(tmp_path: Path) -> None:
    assert read_all(tmp_path / "python", "python")["ran"] == list(hostile(tmp_path))


def ran(what: str, folder: Path) -> bool:
    """Whether a pickle that is read here makes its canary."""
    canary = folder / "canary"
    read_pickle(whole(hostile(canary)[what]), what)
    return canary.exists()


def test_a_dangerous_name_in_the_table_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants of the reader: what the test above looks at turns red."""
    assert not ran("os.system", tmp_path)
    monkeypatch.setitem(TABLE, ("os", "system"), os.system)
    assert ran("os.system", tmp_path)
    (tmp_path / "canary").unlink()
    monkeypatch.undo()

    def make(of: PickledName, arguments: tuple[Any, ...] = ()) -> Any:
        return getattr(__import__(of.module), of.name)(*arguments)

    monkeypatch.setattr(pickle_reader, "InertObject", make)
    assert ran("builtins.exec", tmp_path)


def test_the_table_names_tensors_and_containers_only() -> None:
    assert {".".join(key) for key in TABLE} == {
        "collections.OrderedDict",
        "torch.Size",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_parameter_with_state",
        "torch._tensor._rebuild_from_type_v2",
    }
    assert {made.__module__ for made in TABLE.values()} == {
        "shoal.checkpoint.foreign.pickle_reader"
    }


def test_the_reader_has_no_means_to_run_anything() -> None:
    tree = ast.parse(Path(pickle_reader.__file__).read_text())
    imported = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported == {
        "__future__", "pickletools", "collections.abc", "typing", "shoal.base.errors",
        "shoal.base.plans.tensor_shards", "shoal.checkpoint.foreign.inert_objects",
    }  # fmt: skip
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not used & {"getattr", "eval", "exec", "compile", "__import__", "globals", "vars"}


def test_the_linter_names_the_one_file() -> None:
    """`import pickle` anywhere, and `import pickletools` in another file, are refused."""
    root = Path(__file__).parent.parent.parent
    for module, file, refused in (
        ("pickletools", "checkpoint/foreign/pickle_reader.py", False),
        ("pickletools", "checkpoint/foreign/torch_file.py", True),
        ("pickle", "checkpoint/foreign/torch_file.py", True),
    ):
        command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--quiet"]
        command += ["--stdin-filename", str(root / "src/shoal" / file), "-"]
        source = f"import {module}\n"
        done = subprocess.run(command, input=source, capture_output=True, text=True, cwd=root)
        assert (done.returncode != 0) is refused, done.stdout


def nested(depth: int, inside: bytes, around: bytes) -> bytes:
    return inside + around * depth


LONG = b"X" + struct.pack("<I", KEY_LETTERS + 1) + b"k" * (KEY_LETTERS + 1)
DOUBLED = nested(24, b")q\x00", b"0h\x00h\x00\x86q\x00")  # a tuple of the same twice, 24 times
TENSOR = name("torch._utils", "_rebuild_tensor_v2")
STORAGE = tuple_(text("storage"), name("torch", "FloatStorage"), text("0"), text("cpu"), b"K\x04")
HUGE = b"\x8a\x09" + b"\xff" * 8 + b"\x00"  # 2⁶⁴ − 1

REFUSED = {
    "cut short": (whole(text("weights"))[:-4], "is no whole pickle"),
    "without an end": (whole(b"]")[:-1], "exhausted before seeing STOP"),
    "not a pickle": (b"#!/bin/sh\nrm -rf /\n", "is no whole pickle"),
    "text longer than the file": (whole(b"\x8d" + b"\xff" * 7 + b"\x7fab"), "is no whole pickle"),
    "bytes longer than the file": (whole(b"B\xff\xff\xff\xffab"), "is no whole pickle"),
    "an empty stack": (b"\x80\x04R.", "takes from an empty stack"),
    "a mark that is not there": (b"\x80\x04t.", "takes from an empty stack"),
    "a memo that is not there": (whole(b"h\x07"), "takes back what it never kept"),
    "an extension code": (whole(b"\x82\x01"), "asks for EXT1"),
    "a buffer from outside": (whole(b"\x97", 5), "asks for NEXT_BUFFER"),
    "a persistent id as text": (b"Pos.system\n.", "asks for PERSID"),
    "a persistent id that is a call": (
        whole(call(name("os", "getcwd")) + b"Q"),
        "refers to what is no storage",
    ),
    "a newer protocol": (whole(b"N", 9), "protocol 9"),
    "a key of two to the twenty-fourth": (whole(b"}" + DOUBLED + b"Ns"), "holds more than 64 values"),
    "a long key": (whole(b"}" + LONG + b"Ns"), f"more than {KEY_LETTERS} letters"),
    "a long number as a key": (whole(b"}\x8a\x20" + b"\x7f" * 32 + b"Ns"), "more than 64 bits"),
    "a list as a key": (whole(b"}]Ns"), "that is no value"),
    "items of a tuple": (whole(b")NNs"), "sets items of what is no dict"),
    "appended to a name": (whole(name("os", "sep") + b"Na"), "appends to what is no list"),
    "called with a list": (whole(name("os", "getcwd") + b"]R"), "without a tuple of arguments"),
    "a name that is no text": (whole(b"K\x01K\x02\x93"), "a name that is no text"),
    "a shape of text": (whole(call(name("torch", "Size"), text("9"))), "no short tuple of whole"),
    "a shape of many dims": (
        whole(call(name("torch", "Size"), tuple_(*[b"K\x01"] * 40))),
        "no short tuple of whole",
    ),
    "a tensor without storage": (
        whole(call(TENSOR, name("os", "sep"), b"K\x00", b"K\x01\x85", b"K\x01\x85", b"\x89", b"}")),
        "without a storage",
    ),
    "a tensor of negative size": (
        whole(
            call(TENSOR, STORAGE + b"Q", b"K\x00", b"J\xff\xff\xff\xff\x85", b"K\x01\x85", b"\x89", b"}")
        ),
        "no short tuples of whole numbers",
    ),
    "a tensor of vast size": (
        whole(call(TENSOR, STORAGE + b"Q", b"K\x00", HUGE + b"\x85", b"K\x01\x85", b"\x89", b"}")),
        "no short tuples of whole numbers",
    ),
    "a storage of no kind": (
        whole(tuple_(text("storage"), name("os", "system"), text("0"), text("cpu"), b"K\x04") + b"Q"),
        "a storage of the kind os.system",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_pickle_of_weights_is_one_line(what: str) -> None:
    data, reason = REFUSED[what]
    with pytest.raises(PickleRefused) as refused:
        read_pickle(data, "weights.bin")
    line = str(refused.value)
    assert line.startswith("weights.bin: ")
    assert reason in line
    assert "\n" not in line
    assert len(line) < 300


def test_bombs_cost_what_their_bytes_cost() -> None:
    """Each would take minutes, or all memory, if something were copied, hashed or walked."""
    many = 60_000
    items = b"(" + b"K\x01" * many
    bombs = {
        "lists in lists": whole(b"]" * many + b"a" * (many - 1)),
        "calls of calls": whole(name("os", "system") + b")R" * many),
        "a tuple doubled": whole(DOUBLED),
        "a list called over and over": whole(
            items + b"lq\x00" + name("collections", "OrderedDict") + b"q\x01"
            + b"h\x01h\x00\x85R0" * many
        ),
        "arguments given over and over": whole(
            items + b"tq\x00" + name("torch", "Size") + b"q\x01" + b"h\x01h\x00R0" * many
        ),
        "a state set over and over": whole(
            b"}(" + b"".join(b"J" + struct.pack("<i", n) + b"N" for n in range(many)) + b"uq\x00"
            + name("os", "sep") + b")R" + b"h\x00b" * many
        ),
        "a memo far away": whole(b"Nr\xff\xff\xff\xff"),
    }  # fmt: skip
    for what, data in bombs.items():
        began_s = time.process_time()
        found = read_pickle(data, what)
        assert isinstance(repr(found) if isinstance(found, InertObject) else what, str)
        del found
        assert time.process_time() - began_s < 3, what


def test_any_bytes_are_a_value_or_one_line() -> None:
    """Bytes changed, left out and doubled at random places: never another exception."""
    rng = random.Random(0)
    body = b"".join(hostile(Path("nowhere")).values())
    plain = pickle.dumps([{"a": (1, 2.5)}, {3}, b"x", Path("y"), {("k", 1): None}], 4)
    read, refused = 0, []
    for _ in range(3000):
        data = bytearray(
            rng.choice([plain, body[(at := rng.randrange(len(body))) : at + 99] + b"."])
        )
        for _ in range(rng.randint(1, 2)):
            place = rng.randint(0, len(data))
            data[place : place + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
        try:
            read_pickle(bytes(data), "some")
            read += 1
        except PickleRefused as failure:
            refused.append(str(failure))
    assert read > 100
    assert len(refused) > 100
    assert not [line for line in refused if "\n" in line]


def test_what_python_and_torch_write_is_read_as_it_is(tmp_path: Path) -> None:
    plain = {
        "text": "größe", "numbers": [0, -1, 255, 65_536, 1 << 40, -(1 << 70), 0.5],
        "truth": (True, False, None), "deep": {"a": [{"b": ()}], 3: (1, 2, 3, 4)},
    }  # fmt: skip
    for protocol in range(6):
        assert read_pickle(pickle.dumps(plain, protocol), "plain") == plain
    newer = [b"\0\1", bytearray(b"\2"), {1}, frozenset([2])]
    assert read_pickle(pickle.dumps(newer, 5), "sets are lists") == [b"\0\1", b"\2", [1], [2]]
    twice: list[Any] = []
    twice.append(twice)
    found = read_pickle(pickle.dumps(twice), "a list that holds itself")
    assert found[0] is found
    weights = torch.nn.Linear(3, 2).state_dict()
    torch.save({"w": weights, "when": Path("x"), "n": OrderedDict(a=1)}, tmp_path / "f")
    value = TorchFile(map_file(tmp_path / "f"), "f").value
    assert list(value["w"]) == ["weight", "bias"]
    assert isinstance(value["w"]["weight"], InertTensor)
    assert value["n"] == {"a": 1}
    assert str(value["when"].of).startswith("pathlib.")


def archive(path: Path, members: dict[str, bytes], **options: Any) -> memoryview:
    with zipfile.ZipFile(path, "w", **options) as file:
        for member, data in members.items():
            file.writestr(member, data)
    return map_file(path)


def first_tensor(data: memoryview, where: str) -> bytes:
    file = TorchFile(data, where)
    return file.view(file.value).tobytes()


def test_archives_that_lie(tmp_path: Path) -> None:
    """Names that lead elsewhere are names; sizes are held against the bytes that are there."""

    def tensor(size: bytes, stride: bytes, storage: bytes = STORAGE) -> bytes:
        return whole(call(TENSOR, storage + b"Q", b"K\x00", size, stride, b"\x89", b"}"))

    four, flat = b"\0" * 16, tensor(b"K\x04\x85", b"K\x01\x85")
    lead = STORAGE.replace(text("0"), text("../../../etc/passwd"))
    cases: dict[str, tuple[dict[str, bytes], dict[str, Any], str]] = {
        "no pickle": ({"a/data/0": four}, {}, "0 pickles in it are called"),
        "two": ({"a/data.pkl": flat, "b/data.pkl": flat}, {}, "2 pickles in it are called"),
        "packed": ({"a/data.pkl": flat}, {"compression": zipfile.ZIP_DEFLATED}, "are packed"),
        "other order": ({"a/data.pkl": flat, "a/byteorder": b"big"}, {}, "little-endian"),
        "a program": ({"a/data.pkl": flat, "a/constants.pkl": b""}, {}, "TorchScript"),
        "short storage": ({"a/data.pkl": flat, "a/data/0": four[:8]}, {}, "which has 8 bytes"),
        "no storage": ({"a/data.pkl": flat}, {}, "a/data/0 is missing"),
        "led away": ({"a/data.pkl": tensor(b"K\x04\x85", b"K\x01\x85", lead), "a/data/0": four}, {},
                     "passwd is missing in it"),
        "too long": ({"a/data.pkl": tensor(b"K\x05\x85", b"K\x01\x85"), "a/data/0": four}, {},
                     "ends outside of its storage"),
        "expanded": ({"a/data.pkl": tensor(b"J\xff\xff\xff\x7f\x85", b"K\x00\x85"), "a/data/0": four},
                     {}, "has more elements than its storage"),
    }  # fmt: skip
    for what, (members, options, reason) in cases.items():
        data = archive(tmp_path / what, members, **options)
        with pytest.raises(CheckpointError, match=reason):
            first_tensor(data, what)
    honest = tmp_path / "honest"
    assert first_tensor(archive(honest, {"a/data.pkl": flat, "a/data/0": four}), "honest") == four
    raw = honest.read_bytes()
    shared = raw.replace(  # a second member over the bytes of the first, in the list at the end
        struct.pack("<I", raw.index(b"PK\3\4", 1)) + b"a/data/0", struct.pack("<I", 0) + b"a/data/0"
    )
    assert shared != raw
    (tmp_path / "shared").write_bytes(shared)
    with pytest.raises(CheckpointError, match="does not agree with their bytes"):
        TorchFile(map_file(tmp_path / "shared"), "shared")
    for end in (len(raw) - 1, len(raw) // 2, 30, 3):
        (tmp_path / "cut").write_bytes(raw[:end])
        with pytest.raises(CheckpointError, match="cut short|no whole"):
            TorchFile(map_file(tmp_path / "cut"), "cut")
