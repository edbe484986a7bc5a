"""Pickles that do harm when they are run: each would make one file, the canary.

Assembled opcode by opcode, so that none needs the objects that it names. Run as a program,

    python hostile_pickles.py FOLDER python|python-alone|shoal

it reads each of them by Python's own unpickler, the control: all must run there (`python-alone`:
all that need no other library), or by ours; and prints as JSON which canaries appeared, and what
Python's audit hooks heard meanwhile.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import pickle
import struct
import sys
from pathlib import Path


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def name(module: str, attribute: str) -> bytes:
    """The GLOBAL instruction of protocols 0 to 3."""
    return f"c{module}\n{attribute}\n".encode()


def name4(module: str, attribute: str) -> bytes:
    """The STACK_GLOBAL instruction of protocol 4, which follows dots."""
    return text(module) + text(attribute) + b"\x93"


def tuple_(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def list_(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"l"


def call(of: bytes, *arguments: bytes) -> bytes:
    return of + tuple_(*arguments) + b"R"


def whole(body: bytes, protocol: int = 4) -> bytes:
    return b"\x80" + bytes([protocol]) + body + b"."


def hostile(canary: Path) -> dict[str, bytes]:
    """Pickles by what they try, as bodies: without the protocol before and the STOP after."""
    shell, touch = text(f"touch {canary}"), list_(text("touch"), text(str(canary)))
    source = f"open({str(canary)!r}, 'w').close()"
    code, quoted = text(source), b"S" + repr(f"touch {canary}").encode() + b"\n"
    system, run = name("os", "system"), name("builtins", "exec")
    os_module = call(name("importlib", "import_module"), text("os"))
    kind = call(
        name("builtins", "type"),
        text("X"),
        tuple_(name("builtins", "object")),
        b"(" + text("__setstate__") + system + b"d",
    )
    inner = whole(call(system, shell))
    inner = b"B" + struct.pack("<I", len(inner)) + inner
    rot13 = text(codecs.encode(source, "rot13"))
    hub = text(str(canary.parent / "hub"))
    getter = call(name("operator", "attrgetter"), text("system"))
    mapped = call(name("builtins", "map"), system, list_(shell))
    timer = name("timeit", "default_timer")
    array = call(
        name("numpy._core.multiarray", "_reconstruct"),
        name("numpy", "ndarray"),
        tuple_(b"K\x00"),
        call(system, shell),
    )
    return {
        "os.system": b"c" + b"os\nsystem\n(" + quoted + b"tR",
        "os.system by STACK_GLOBAL": call(name4("posix", "system"), shell),
        "subprocess by INST": b"(" + touch + b"isubprocess\nPopen\n",
        "subprocess by OBJ": b"(" + name("subprocess", "Popen") + touch + b"o",
        "builtins.eval": call(name("builtins", "eval"), code),
        "builtins.exec": call(run, code),
        "a dotted name": call(name4("shutil", "os.system"), shell),
        "a chain of getattr": call(
            call(name("builtins", "getattr"), os_module, text("system")), shell
        ),
        "operator.attrgetter": call(call(getter, os_module), shell),
        "functools.partial": call(call(name("functools", "partial"), system, shell)),
        "__setstate__ by BUILD": kind + b")\x81" + shell + b"b",
        "map in an OrderedDict": call(name("collections", "OrderedDict"), mapped),
        "map in a list": call(name("builtins", "list"), mapped),
        "codecs, then exec": call(run, call(name("codecs", "decode"), rot13, text("rot13"))),
        "a pickle in a pickle": call(name("pickle", "loads"), inner),
        "pickle by torch's name": call(name4("torch.serialization", "pickle.loads"), inner),
        "torch.hub": call(name("torch.hub", "_load_local"), hub, text("make")),
        "torch's own rebuild": call(
            name("torch._tensor", "_rebuild_from_type_v2"),
            system,
            name("torch", "Tensor"),
            tuple_(shell),
            b"}",
        ),
        "numpy's runstring": call(name("numpy.testing._private.utils", "runstring"), code, b"}"),
        "numpy's reconstruct": array,
        "timeit": call(name("timeit", "timeit"), code, text("pass"), timer, b"K\x01"),
        "the extension registry": call(
            name("copyreg", "add_extension"), text("os"), text("system"), b"K\xf0"
        )
        + b"0\x82\xf0"
        + tuple_(shell)
        + b"R",
        "copyreg.__newobj__": call(name("copyreg", "__newobj__"), name("builtins", "object"))
        + b"0"
        + call(system, shell),
        "a call as a key": b"}" + call(system, shell) + text("w") + b"s",
        "a call thrown away": call(system, shell) + b"0N",
        "a call kept and taken back": call(system, shell) + b"q\x000h\x00",
    }


def main(folder: Path, reader: str) -> None:
    """Read all of them, each with a canary of its own."""
    hub = folder / "hub"
    hub.mkdir()
    (hub / "hubconf.py").write_text("import os\ndef make(): open(os.environ['CANARY'], 'w')\n")
    if reader == "shoal":
        from shoal.checkpoint.foreign.pickle_reader import read_pickle as read
    else:

        def read(data: bytes, where: str) -> object:
            return pickle.Unpickler(io.BytesIO(data)).load()

    heard: list[str] = []
    said: dict[str, str] = {}
    listening = False

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if listening:
            heard.append(event)

    sys.addaudithook(hear)
    everything = hostile(folder / "0")
    alone = {w for w, body in everything.items() if b"torch" not in body and b"numpy" not in body}
    for number, what in enumerate(w for w in everything if w in alone or reader != "python-alone"):
        canary = folder / str(number)
        os.environ["CANARY"] = str(canary)
        data = whole(hostile(canary)[what])
        listening = True
        try:
            said[what] = repr(read(data, what))
        except Exception as failure:
            said[what] = f"{type(failure).__name__}: {failure}"
        listening = False
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()  # for what Popen started
    ran = [what for number, what in enumerate(said) if (folder / str(number)).exists()]
    print(json.dumps({"ran": ran, "heard": sorted({*heard}), "said": said}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
