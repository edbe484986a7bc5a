"""Statements of `src` that only a device other than the CPU reaches, and whether one here reached them.

    python tests/simgpu/device_lines.py                  lists them
    python tests/simgpu/device_lines.py --out FILE       runs them on simulated devices; writes the table

Found by reading, not by hand: every test is evaluated as a run on the CPU would (`device.type` is
"cpu", there is no accelerator, what follows from both through names, attributes and functions); what is
behind a test that is false there, or behind a return that is taken there, only a device reaches; so does
the body of a function or class to which all references stand in such places.
Reached   the statement began, in any process or thread: a line before it says so (`site/reached.py`)
Limits    parts of expressions (`a if device else b`) are no statements. What the analysis cannot decide
          counts as reached by the CPU too
"""

from __future__ import annotations

import argparse
import ast
import json
import operator
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from ranks import world
from simulated.build import library

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"

Values = frozenset[Any]
"""What an expression may be on the CPU; None: anything."""

FALSE, NOTHING, HOST = frozenset([False]), frozenset([None]), frozenset(["cpu"])
DEVICES_OWN = (
    "shoal/parallel/offload/copy_stream.py",
    "shoal/parallel/offload/offloaded_activations.py",
    "shoal/parallel/offload/parameters.py",
    "shoal/trace/isolation/stream_weights.py:_WeightStreamMode.__init__",
    "shoal/trace/isolation/stream_weights.py:_WeightStreamMode.__torch_function__",
    "shoal/trace/isolation/stream_weights.py:_WeightStreamMode._is_streamed",
    "shoal/trace/isolation/stream_weights.py:_WeightStreamMode._to_host",
    "shoal/trace/isolation/stream_weights.py:_WeightStreamMode._device_property",
    "shoal/trace/isolation/stream_weights.py:_is_write_method",
    "shoal/fabric/device.py:peak_bytes",
    "shoal/fabric/device.py:allocated_bytes",
    "shoal/fabric/device.py:total_bytes",
)
"""Files and functions that no run on the CPU calls, and whose names do not tell: others have the same."""
KINDS = {"cpu", "cuda", "xpu", "mps", "hip"}
COMPARED = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = Function | ast.ClassDef


@dataclass
class Room:
    """A function, with what surrounds it."""

    file: str
    path: str
    node: Function
    method: bool = False
    devices_own: bool = False

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All below, in order, without the bodies of functions inside."""
        return list(own_nodes(self.node))

    @cached_property
    def locals(self) -> dict[str, list[ast.expr | None]]:
        """What is assigned to each name; None: something that is not read here."""
        return locals_of(self.node, self.nodes)

    @cached_property
    def attributes(self) -> list[tuple[ast.AST, ast.Attribute, ast.expr | None]]:
        """(statement, attribute, value) of all that is stored in one."""
        told = [
            (node, target, value)
            for node in self.nodes
            for targets, value in [assigned(node)]
            for target in targets
            if isinstance(target, ast.Attribute)
        ]
        plain = {id(target) for _, target, _ in told}
        told += [  # of a tuple, a loop, a `with`
            (node, node, None)
            for node in self.nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and id(node) not in plain
        ]
        return told


@dataclass(frozen=True)
class Statement:
    """One statement: which of its like in its function, and where it stands today."""

    file: str
    inside: str
    text: str
    turn: int
    line: int

    @property
    def key(self) -> str:
        """Its name in the table, which no edit elsewhere changes."""
        again = f" #{self.turn + 1}" if self.turn else ""
        return f"{self.inside}: {self.text}{again}"


class Reader:
    """Evaluates all functions as a run on the CPU would."""

    def __init__(self, source: Path) -> None:
        self.trees = {
            str(path.relative_to(source)): ast.parse(path.read_text())
            for path in sorted(source.rglob("*.py"))
        }
        self.rooms = [room for file, tree in self.trees.items() for room in rooms(file, tree)]
        names = Counter(room.node.name for room in self.rooms)
        self.unique = {r.node.name: r for r in self.rooms if names[r.node.name] == 1}
        self.attributes: dict[str, Values | None] = {}
        self.owned: set[int] = set()
        self.fields = [
            node.target.id
            for tree in self.trees.values()
            for outer in ast.walk(tree)
            if isinstance(outer, ast.ClassDef)
            for node in outer.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]
        every = [n for tree in self.trees.values() for n in ast.walk(tree) if isinstance(n, Scope)]
        times = Counter(node.name for node in every)
        self.defined = {node.name: node for node in every if times[node.name] == 1}
        self.places: dict[str, list[tuple[int, ...]]] = {}
        for tree in self.trees.values():
            for name, around in references(tree):
                node = self.defined.get(name)
                if node is not None and id(node) not in around:
                    self.places.setdefault(name, []).append(around)
        self.device: set[int] = set()  # ids of statements
        self.results: dict[str, Values | None] = {}
        for place in DEVICES_OWN if source == SOURCE else ():
            file, _, name = place.partition(":")
            named = [r.node for r in self.rooms if r.file == file and r.path == name]
            self.own(named[0] if name else self.trees[file])
        while True:
            before = len(self.device)
            self.results = {}
            for room in self.rooms:
                self.walk(room.node.body, room, self.is_device(room))
            self.read_attributes()
            self.read_references()
            if len(self.device) == before:
                break

    def is_device(self, room: Room) -> bool:
        return room.devices_own or id(room.node) in self.device

    # ---- values

    def value(self, node: ast.expr | None, room: Room) -> Values | None:
        """What an expression may be on the CPU."""
        match node:
            case ast.Constant(value=value):
                return frozenset([value])
            case ast.Name(id=name):
                return self.local(name, room)
            case ast.Attribute(attr="type"):
                return HOST
            case ast.Attribute(attr="is_cuda"):
                return FALSE
            case ast.Attribute(value=ast.Name(id="self"), attr=attribute):
                return self.attributes.get(attribute)
            case ast.Tuple(elts=parts):
                values = [self.value(part, room) for part in parts]
                if any(v is None for v in values):
                    return None
                return frozenset(product(*(v for v in values if v is not None)))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                truth = self.truth(operand, room)
                return None if truth is None else frozenset([not truth])
            case ast.BoolOp(op=op, values=values):
                return self.both(isinstance(op, ast.And), values, room)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                truth = self.truth(test, room)
                if truth is not None:
                    return self.value(body if truth else orelse, room)
                return joined(self.value(body, room), self.value(orelse, room))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self.compared(left, op, right, room)
            case ast.Call(func=ast.Attribute(attr="current_accelerator")):
                return NOTHING
            case ast.Call(func=ast.Name(id="first_accelerator")):
                return NOTHING
            case ast.Call(func=ast.Name(id=name)) if name in self.unique:
                return self.result(self.unique[name])
        return None

    def compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr, room: Room) -> Values | None:
        one, other = self.value(left, room), self.value(right, room)
        if one is None or other is None or type(op) not in COMPARED:
            return None
        if isinstance(left, ast.Attribute) and left.attr == "type":
            # An event or a node has a type too; "meta" is no device, and runs on the CPU meet it.
            named = {k for v in other for k in (v if isinstance(v, tuple) else (v,))}
            if not named & KINDS:
                return None
        return frozenset(COMPARED[type(op)](a, b) for a, b in product(one, other))

    def both(self, conjunction: bool, parts: list[ast.expr], room: Room) -> Values | None:
        truths = [self.truth(part, room) for part in parts]
        if (not conjunction) in truths:
            decided = truths.index(not conjunction)
            return (self.value(parts[decided], room) if decided == 0 else None) or frozenset(
                [not conjunction]
            )
        return self.value(parts[-1], room) if None not in truths else None

    def truth(self, node: ast.expr, room: Room) -> bool | None:
        values = self.value(node, room)
        if values is None or len({bool(value) for value in values}) > 1:
            values = self.by_name(node, room)
        truths = {bool(value) for value in values} if values else set()
        return truths.pop() if len(truths) == 1 else None

    def by_name(self, node: ast.expr, room: Room) -> Values | None:
        """A test of one name, for each value that the name may have."""
        if not isinstance(node, ast.BoolOp):
            return None
        names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        known = {name: values for name in names if (values := self.local(name, room))}
        if len(known) != 1:
            return None
        ((name, values),) = known.items()
        kept, results = room.locals[name], []
        for value in values:
            room.locals[name] = [ast.Constant(value)]
            results.append(self.value(node, room))
        room.locals[name] = kept
        return None if None in results else frozenset().union(*(r for r in results if r))

    def local(self, name: str, room: Room) -> Values | None:
        """A name of which every assignment in its function is known."""
        given = room.locals.get(name)
        if not given or None in given:
            return None
        room.locals[name] = [None]  # while it is read: of itself nothing is known
        values = [self.value(one, room) for one in given]
        room.locals[name] = given
        known = [value for value in values if value is not None]
        return frozenset().union(*known) if len(known) == len(values) else None

    def result(self, room: Room) -> Values | None:
        """What a function returns on the CPU."""
        if room.node.name in self.results:
            return self.results[room.node.name]
        self.results[room.node.name] = None
        body = room.nodes
        if room.method or any(isinstance(n, ast.Yield | ast.YieldFrom) for n in body):
            return None
        falls = self.walk(room.node.body, room, self.is_device(room))
        values: Values | None = NOTHING if falls else frozenset()
        for node in body:
            if isinstance(node, ast.Return) and (
                id(node) not in self.device or self.is_device(room)
            ):
                values = joined(values, self.value(node.value, room) if node.value else NOTHING)
        self.results[room.node.name] = values or None
        return self.results[room.node.name]

    # ---- statements

    def walk(self, body: list[ast.stmt], room: Room, device: bool) -> bool:
        """Mark what a body's device alone reaches; whether a run on the CPU goes past its end."""
        past = True
        for node in body:
            here = device or not past
            if here:
                self.device.add(id(node))
            if isinstance(node, ast.If):
                truth = self.truth(node.test, room)
                first = self.walk(node.body, room, here or truth is False)
                second = self.walk(node.orelse, room, here or truth is True)
                goes = (first and truth is not False) or (second and truth is not True)
            elif isinstance(node, Scope):
                if here:
                    for inner in ast.walk(node):
                        self.device.add(id(inner))
                goes = True
            else:
                goes = not isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break)
                for inner in bodies(node):
                    self.walk(inner, room, here)
            past = past and goes
        return past

    def read_attributes(self) -> None:
        """Attributes that a run on the CPU never gives another value than None or False."""
        found: dict[str, Values | None] = dict.fromkeys(self.fields)
        for room in self.rooms:
            for node, target, value in room.attributes:
                if id(node) not in self.device:
                    told = self.value(value, room) if value is not None else None
                    found[target.attr] = joined(found.get(target.attr, frozenset()), told)
        # A number or a text may be counted or kept elsewhere; None and False say "there is none".
        self.attributes = {
            name: values for name, values in found.items() if values and values <= {None, False}
        }

    def read_references(self) -> None:
        """Functions and classes that only such statements name belong to the device whole."""
        for name, node in self.defined.items():
            places = self.places.get(name, ())
            if id(node) in self.owned or not places:
                continue
            if all(any(id_ in self.device for id_ in around) for around in places):
                self.own(node)

    def own(self, node: ast.AST) -> None:
        """All functions of a module, class or function are the device's."""
        self.owned.add(id(node))
        inside = {id(inner) for inner in ast.walk(node)}
        for room in self.rooms:
            if id(room.node) in inside:
                room.devices_own = True
                self.walk(room.node.body, room, True)

    def statements(self) -> list[Statement]:
        """All that only a device reaches, in order."""
        found = []
        for room in self.rooms:
            turns: Counter[str] = Counter()
            for node in room.nodes:
                if not isinstance(node, ast.stmt) or id(node) not in self.device:
                    continue
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                    continue  # a docstring
                text = ast.unparse(node).splitlines()[0][:100]
                found.append(Statement(room.file, room.path, text, turns[text], node.lineno))
                turns[text] += 1
        return found


def rooms(file: str, tree: ast.Module) -> Iterator[Room]:
    """All functions of a module, those inside of others too."""

    def inside(node: ast.AST, path: str, method: bool) -> Iterator[Room]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Scope):
                here = f"{path}.{child.name}".lstrip(".")
                if isinstance(child, Function):
                    yield Room(file, here, child, method)
                yield from inside(child, here, isinstance(child, ast.ClassDef))
            else:
                yield from inside(child, path, method)

    yield from inside(tree, "", False)


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, in order, without the bodies of functions inside."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, Scope):
            yield from own_nodes(child)


def bodies(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Statements inside of a loop, a `with`, a `try`, a `match`."""
    for name in ("body", "orelse", "finalbody"):
        if inner := getattr(node, name, None):
            yield inner
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield part.body


def assigned(node: ast.AST) -> tuple[list[ast.expr], ast.expr | None]:
    """Targets of an assignment, and its value where it is one."""
    if isinstance(node, ast.Assign):
        return node.targets, node.value
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return [node.target], node.value
    if isinstance(node, ast.AugAssign):
        return [node.target], None
    return [], None


def locals_of(node: Function, nodes: list[ast.AST]) -> dict[str, list[ast.expr | None]]:
    """What is assigned to each name of a function; None: something that is not read here."""
    found: dict[str, list[ast.expr | None]] = {}
    arguments = node.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    for one in (*every, arguments.vararg, arguments.kwarg):
        if one is not None:
            found[one.arg] = [None]
    plain = set()
    for inner in nodes:
        targets, value = assigned(inner)
        for target in targets:
            plain.add(id(target))
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(value)
    for inner in nodes:
        stored = isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
        if stored and id(inner) not in plain:
            found.setdefault(inner.id, []).append(None)
    return found


def references(tree: ast.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, the statements around, innermost last) of every use of a name."""

    def inside(node: ast.AST, around: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        for label, child in fields(node):
            if label in ("annotation", "returns") or isinstance(child, ast.Import | ast.ImportFrom):
                continue
            if isinstance(child, ast.Name):
                yield child.id, around
            elif isinstance(child, ast.Attribute):
                yield child.attr, around
            statement = (id(child),) if isinstance(child, ast.stmt) else ()
            yield from inside(child, (*around, *statement))

    yield from inside(tree, ())


def fields(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Children with the names of their places."""
    for label, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield label, child


def joined(one: Values | None, other: Values | None) -> Values | None:
    """Either."""
    return None if one is None or other is None else one | other


def statements(source: Path = SOURCE) -> list[Statement]:
    """Everything in `src` that only a device reaches."""
    return Reader(source).statements()


def by_file(found: Iterable[Statement]) -> dict[str, list[Statement]]:
    """In the order of the files."""
    told: dict[str, list[Statement]] = {}
    for one in found:
        told.setdefault(one.file, []).append(one)
    return told


# ---- what ran ---------------------------------------------------------------------------------------
class Rooms:
    """Runs programs on simulated devices with a note before every such statement."""

    def __init__(self, found: list[Statement], folder: Path) -> None:
        self.found, self.noted = found, folder / "reached"
        lines: dict[str, dict[int, int]] = {}
        for number, one in enumerate(found):
            lines.setdefault(str(SOURCE / one.file), {})[one.line] = number
        (folder / "lines.json").write_text(json.dumps(lines))
        self.noted.touch()
        self.environ = {
            **os.environ,
            "SIM_LIBRARY": str(library()),
            "SIM_DEVICES": "4",
            "SIM_LINES": str(folder / "lines.json"),
            "SIM_REACHED": str(self.noted),
            "PYTHONPATH": os.pathsep.join((str(HERE / "site"), str(SOURCE))),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
        }

    def reached(self) -> set[int]:
        """Numbers of the statements that began so far."""
        return {int(line) for line in self.noted.read_text().split()}

    def run(self, *words: str, **settings: str) -> None:
        """A program of one process."""
        done = subprocess.run(
            [sys.executable, *words], env={**self.environ, **settings},
            capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{' '.join(words)[:200]}: {done.stderr[-3000:]}")

    def all(self) -> None:
        """Everything that reaches one."""
        told = world("own_loop.py", 2, LOOPS, self.environ)
        wrong = {name: row for name, row in told["rows"].items() if isinstance(row, str)}
        if wrong:
            raise SystemExit(str(wrong))
        print("loops", len(self.reached()), flush=True)
        self.run(str(HERE / "offload_case.py"), json.dumps(list(HOSTED)), SIM_DEVICES="1")
        print("host", len(self.reached()), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            self.run("-m", "shoal", "train", *TRAIN, f"run.folder={folder}")
        print("shoal train", len(self.reached()), flush=True)
        self.run(str(HERE / "rooms.py"))
        self.run(str(HERE / "replicas.py"), "too_many_replicas_are_refused")
        self.run(str(HERE / "part_times.py"), SIM_DEVICES="1")
        print("rooms", len(self.reached()), flush=True)


LOOPS = (
    *("ddp", "zero1", "zero2", "fsdp", "tp", "pp", "cp", "ep", "saved", "bf16 weights"),
    *("offload activations", "compress", "parked", "lane", "ring", "uneven", "refused", "rate"),
)
TRAIN = (
    *("data.source=synthetic", "data.sequence=16", "model.dim=32", "model.layers=2"),
    *("train.steps=2", "train.batch=4", "launch.processes=2"),
)
SMALL = {
    "precision": "fp64", "micro_batch": 1, "rows": 2, "model": {"dim": 256, "layers": 3},
    "mode": "drawn", "seed": 0, "limit_bytes": 2**28, "offload": "parameters",
}  # fmt: skip
HOSTED = (
    {**SMALL, "offload": "optimizer"},
    {**SMALL, "offload": "optimizer", "model": {"dim": 512, "layers": 4}, "precision": "fp32"}
    | {"limit_bytes": 184 * 2**20},
    SMALL,
    {**SMALL, "model": None},
    {**SMALL, "precision": "bf16", "model": {"dim": 384, "layers": 2}},
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    found = statements()
    if out is None:
        for file, those in by_file(found).items():
            print(file, len(those))
            print("\n".join(f"    {one.line:4} {one.key}" for one in those))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rooms_ = Rooms(found, Path(folder))
        try:
            rooms_.all()
        finally:
            reached = rooms_.reached()
            missing = [one for number, one in enumerate(found) if number not in reached]
            table = {
                file: {one.key: None for one in those} for file, those in by_file(found).items()
            }
            for one in missing:
                table[one.file][one.key] = EXCEPTIONS.get((one.file, one.key), "")
            told = {"statements": len(found), "not reached": len(missing), "files": table}
            out.write_text(json.dumps(told, indent=1) + "\n")
            for one in missing:
                print("not reached:", one.file, one.line, one.key)
    return int(any((one.file, one.key) not in EXCEPTIONS for one in missing))


OTHER_VENDOR = "only for a device that torch does not call cuda"
FLASH = "torch's flash kernel of CUDA, which a simulated device lacks; tests/cuda runs it"
KERNELS = "shoal/parallel/context_parallel/attention_kernels.py"
EXCEPTIONS: dict[tuple[str, str], str] = {
    **{
        (KERNELS, key): FLASH
        for key in (
            "attend: out, lse, *_ = flash_device(q, k, v, 0.0, causal, False, scale=scale)",
            "attend: return AttentionResult(out, lse)",
            "attend_backward: draws = torch.zeros(2, dtype=torch.uint64, device=q.device)",
            "attend_backward: sizes = (None, None, q.shape[2], k.shape[2])",
            "attend_backward: known = (gradient, q, k, v, out, lse)",
            "attend_backward: dq, dk, dv = flash_device_backward(*known, *sizes, 0.0, causal, draws, "
            "draws, scale=scale)",
            "attend_backward: return (dq, dk, dv)",
        )
    },
    ("shoal/fabric/device.py", "_has_flash: return False"): OTHER_VENDOR,
    ("shoal/fabric/device.py", "pin_host_memory: return None"): OTHER_VENDOR,
    (
        "shoal/fabric/device.py",
        "pin_host_memory: return None #2",
    ): "the simulated driver pins whatever it is asked to",
    ("shoal/fabric/device.py", "device_generators: return []"): (
        "a simulated device is begun with the import of torch; CUDA when it is first used"
    ),
    (
        "shoal/parallel/compose.py",
        "_apply_data_parallel: from shoal.parallel.data_parallel.device_replicas import apply",
    ): "each of these programs has one device; `replicas.py` here has several",
    ("shoal/parallel/offload/parameters.py", "StreamedGradients._hook.ready: return"): (
        "a backward pass of the user's own, beside the step's; none of these programs makes one"
    ),
    (
        "shoal/parallel/offload/offloaded_activations.py",
        "ActivationOffload.__deepcopy__: return self",
    ): ("fsdp alone copies a module; the programs that offload here run in one process"),
}
"""Statements that no simulated device reaches, and why."""


if __name__ == "__main__":
    raise SystemExit(main())
