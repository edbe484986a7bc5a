"""Checks of `data.source` before any process starts, without torch.

    stdlib · digits · synthetic · text:GLOB · jsonl:GLOB · parquet:GLOB · hf:FOLDER · tokens:FOLDER
    images:FOLDER · wds:GLOB · mix:0.7*SOURCE+0.3*SOURCE · pkg.mod:function

shoal.data parses the same texts again when the run opens its data. Both use this file, so a mistake
is reported once, in one way. The check searches for a user's module, but never imports it.
"""

from __future__ import annotations

import difflib
import glob
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from shoal.base.errors import ConfigError, format_choice_error, nearest_word
from shoal.base.moved_modules import current_path
from shoal.config.mixture_syntax import split_mixture
from shoal.config.sections import DataSection

ON_DISK = {
    "text": "text:GLOB",
    "jsonl": "jsonl:GLOB",
    "parquet": "parquet:GLOB",
    "hf": "hf:FOLDER",
    "tokens": "tokens:FOLDER",
    "images": "images:FOLDER",
    "wds": "wds:GLOB",
}
"""Kinds that read files, and their syntax."""

KINDS = ("stdlib", *ON_DISK, "digits", "synthetic", "mix", "function")
ROWS = ("jsonl", "parquet", "hf")
"""Kinds whose rows have text, or prompts and answers, under names."""

TEXTS = ("stdlib", "text", *ROWS)
"""Kinds that a tokenizer encodes."""

GLOBS = {"text": "txt", "jsonl": "jsonl", "parquet": "parquet", "wds": "tar"}
"""Kinds that are written as a glob pattern, and the usual suffix of their files."""

BY_SUFFIX = {f".{suffix}": kind for kind, suffix in GLOBS.items()}
BY_SUFFIX |= {".md": "text", ".json": "jsonl"}

NEEDS = {"parquet": "pyarrow", "hf": "datasets", "images": "PIL", "wds": "PIL"}
"""Kinds that need a library of the extra `data`, and its module."""

MIXED = "mix:0.7*SOURCE+0.3*SOURCE"
FORMS = ("stdlib", *ON_DISK.values(), "digits", "synthetic", MIXED, "pkg.mod:function")

LEAST_VOCABULARY = 257
"""256 bytes and the end-of-text token."""


def split_source(source: str, where: str = "data.source") -> tuple[str, str]:
    """Split a data source into (kind, argument); kind is one of KINDS.

    The argument of text, jsonl, tokens and mix is the text after the colon. Of a function it is the
    whole text, for the others "".

    Raises:
        ConfigError: the text is no source (with the nearest), or names no files; `where` is the key
            in its message.

    >>> split_source("text:books/*.txt"), split_source("my.mod:make"), split_source("digits")
    (('text', 'books/*.txt'), ('function', 'my.mod:make'), ('digits', ''))
    """
    head, colon, rest = source.partition(":")
    if not colon and head in ("stdlib", "digits", "synthetic"):
        return head, ""
    if rest and (head in ON_DISK or head == "mix"):
        return head, rest
    if head == "mix":
        raise ConfigError(f"{where} = {source}: mixes nothing; try: {MIXED}")
    if head in ON_DISK:
        raise ConfigError(f"{where} = {source}: names no files; try: {ON_DISK[head]}")
    names = [*head.split("."), rest]
    if colon and head not in KINDS and all(name.isidentifier() for name in names):
        return "function", source
    close = nearest_word(head, KINDS[:-1])
    named = close in ON_DISK or close == "mix"
    hint = f"; try: {close}{colon + rest if named else ''}"
    kind = BY_SUFFIX.get(Path(source).suffix.lower())
    if kind and (close is None or not rest):
        raise ConfigError(f"{where} = {source}: names no kind; try: {kind}:{rest or source}")
    if close is None or (named and not rest):
        raise ConfigError(format_choice_error(where, source, FORMS))
    raise ConfigError(f"{where} = {source}: not one of {', '.join(FORMS)}{hint}")


def describe_other_file(path: Path) -> str:
    """Say what a file seems to be that is not a run.toml, and what gives such a file to a run.

    Args:
        path: named by its suffix alone; it need not exist.

    Returns:
        A part of an error's line; "" for a suffix that says nothing.

    >>> describe_other_file(Path("web/chats.jsonl"))
    'holds data, and a run.toml is wanted; try: data.source=jsonl:web/chats.jsonl'
    >>> describe_other_file(Path("train.py"))
    'is a script, and starts by itself: python train.py; to prove it: shoal prove -- train.py'
    """
    suffix, wanted = path.suffix.lower(), "and a run.toml is wanted"
    if suffix == ".py":
        return (
            f"is a script, and starts by itself: python {path}; to prove it: shoal prove -- {path}"
        )
    if path.name == "config.json":
        return f"describes a model, {wanted}; try: model.name=hf:{path.parent}"
    if kind := BY_SUFFIX.get(suffix):
        return f"holds data, {wanted}; try: data.source={kind}:{path}"
    if suffix in (".yaml", ".yml"):
        return f"is YAML, {wanted}; keys of a command are written section.key=value"
    return ""


def is_remote(source: str) -> bool:
    """Return whether a source, or a part of a mixture, has an address such as s3://bucket/name.

    >>> is_remote("jsonl:s3://bucket/*.jsonl"), is_remote("jsonl:web/*.jsonl")
    (True, False)
    """
    return "://" in source


def suggest_path(path: Path, kind: str = "") -> str:
    """Return a hint for a missing path: a similar name, or its nearest existing folder.

    Args:
        kind: the word before the colon of a data source; the hint is then a whole source.
    """
    missing = path
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        missing, folder = folder, folder.parent
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        names = []
    lead = f"{kind}:" if kind else ""
    alike = difflib.get_close_matches(missing.name, names, n=1, cutoff=0.5)
    if alike:
        return f"try: {lead}{folder / alike[0] / path.relative_to(missing)}"
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    where = f"nearest existing folder: {folder} ({'has ' + shown if names else 'empty'})"
    return f"{where}; try: {_suggest_files(folder, names, kind)}" if kind else where


def _suggest_files(folder: Path, names: list[str], kind: str) -> str:
    """Return a source that exists in a folder, else the place where paths begin."""
    suffix = GLOBS.get(kind, "")
    if suffix and any(name.endswith(f".{suffix}") for name in names):
        return f"{kind}:{folder}/*.{suffix}"
    return f"{kind}:PATH of an existing {'file' if suffix else 'folder'}, as seen from {Path.cwd()}"


def fixed_folder(pattern: str) -> Path:
    """Return the folder of a path pattern before its first wildcard; without one, its parent.

    It expands `~`.

    >>> fixed_folder("books/old/**/*.txt").as_posix(), fixed_folder("books/a.txt").as_posix()
    ('books/old', 'books')
    """
    parts = Path(pattern).expanduser().parts
    plain = [i for i, part in enumerate(parts) if glob.has_magic(part)]
    return Path(*parts[: plain[0] if plain else -1])


def _iterate_matches(pattern: str) -> Iterator[Path]:
    found = glob.iglob(str(Path(pattern).expanduser()), recursive=True)
    return (Path(name) for name in found if os.path.isfile(name))


def glob_files(pattern: str, where: str = "data.source", kind: str = "text") -> list[Path]:
    """Return every file, not folder, that a pattern with `*`, `?`, `**` and `~` matches, sorted.

    Raises:
        ConfigError: there is none; with the nearest existing folder or name. `where` is the key in
            its message, `kind` the word before the colon.
    """
    files = sorted(set(_iterate_matches(pattern)))
    if not files:
        _refuse_pattern(pattern, where, kind)
    return files


def _refuse_pattern(pattern: str, where: str, kind: str) -> None:
    path = Path(pattern).expanduser()
    if path.is_dir():
        suffix = GLOBS[kind]
        hint = f"it is a folder; try: {kind}:{pattern.rstrip('/')}/**/*.{suffix}"
        if next(path.rglob(f"*.{suffix}"), None) is None:
            hint = f"it is a folder without *.{suffix}; try: {kind}:{pattern.rstrip('/')}/**/*.*"
    elif path.exists():
        hint = f"it is no regular file; try: {kind}:FILE"
    else:
        hint = suggest_path(path, kind)
    raise ConfigError(f"{where} = {kind}:{pattern}: no file matches; {hint}")


def _missing_module(name: str) -> str | None:
    """Return the first missing part of a dotted name, importing nothing; None if all exist."""
    search: list[str] | None = None
    done = ""
    for part in name.split("."):
        done = f"{done}.{part}" if done else part
        if done in sys.modules:
            search = list(getattr(sys.modules[done], "__path__", []))
            continue
        try:
            if search is None:
                spec = importlib.util.find_spec(part)
            else:
                spec = importlib.machinery.PathFinder.find_spec(done, search)
        except (ImportError, ValueError):
            return done
        if spec is None:
            return done
        search = list(spec.submodule_search_locations or [])
    return None


def add_working_folder() -> None:
    """Add the working folder to sys.path, as Python does for a script, for a user's own modules."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def find_module_folder(module: str, path: Path) -> Path | None:
    """Return the nearest folder above a path that holds a module; None: no such folder does.

    A run is often opened from another folder than the one in which it was started.
    """
    file = Path(*module.split("."))
    for folder in path.absolute().parents:
        if any((folder / one).is_file() for one in (file.with_suffix(".py"), file / "__init__.py")):
            return folder
    return None


def check_function(name: str, where: str, near: Path | None = None) -> None:
    """Refuse a name that is not pkg.mod:function, or whose module cannot be found.

    It imports nothing, and does not check that the module has the function.

    Args:
        near: the run.toml that has the name; folders above it are suggested.

    Note:
        adds the working folder to sys.path.

    Raises:
        ConfigError: with the nearest module; `where` is the key in its message.
    """
    add_working_folder()
    module, _, attribute = name.partition(":")
    module = current_path(module)
    if not module or not attribute:
        raise ConfigError(f"{where} = {name}: must be pkg.mod:function")
    file = Path(module)
    if file.suffix == ".py" and file.is_file():
        dotted = ".".join(part for part in file.with_suffix("").parts if part not in (".", "/"))
        raise ConfigError(
            f"{where} = {name}: is a file, a module is wanted; try: {dotted}:{attribute}"
        )
    missing = _missing_module(module)
    if missing is None:
        return
    folder = Path(*missing.split(".")[:-1])
    there = [p.stem for p in folder.glob("*") if p.suffix == ".py" or any(p.glob("*.py"))]
    alike = difflib.get_close_matches(missing.rpartition(".")[2], there, n=1, cutoff=0.6)
    hint = f"it is looked for in {os.getcwd()} and in installed packages"
    if near is not None and (home := find_module_folder(module, near)):
        hint = f"try: cd {home}, which has it, and the same command there"
    elif alike:
        hint = f"try: {'.'.join([*missing.split('.')[:-1], alike[0]])}"
    raise ConfigError(f"{where} = {name}: there is no module {missing}; {hint}")


def load_function(name: str, where: str) -> Callable[..., Any]:
    """Import the module of `pkg.mod:function` and return the function, or another callable.

    Note:
        adds the working folder to sys.path.

    Raises:
        ConfigError: a module or name is missing (with the nearest), fails when imported, or is not
            callable; `where` is the key in its message.
    """
    module_name, _, attribute = name.partition(":")
    module_name = current_path(module_name)
    check_function(name, where)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        failure = ConfigError(
            f"{where} = {name}: importing {module_name} raises {type(error).__name__}: {error}"
        )
        failure.add_note("".join(traceback.format_exception(error)))  # for the log
        raise failure from error
    function = getattr(module, attribute, None)
    if function is None:
        close = nearest_word(attribute, [n for n in vars(module) if not n.startswith("_")])
        hint = f"; try: {module_name}:{close}" if close else ""
        raise ConfigError(f"{where} = {name}: {module_name} has no {attribute}{hint}")
    if not callable(function):
        raise ConfigError(f"{where} = {name}: is {type(function).__name__}, not a function")
    return function  # type checkers see Any here; callable() has checked it


def check_data_path(source: str, where: str = "data.source", near: Path | None = None) -> None:
    """Refuse a data source whose files, folder or module do not exist on this machine.

    It looks for files, folders, modules and scikit-learn; it opens and imports none of them.

    Args:
        near: as in `check_function`.

    Raises:
        ConfigError: one line; `where` is the key in its message.
    """
    kind, argument = split_source(source, where)
    if kind in NEEDS and importlib.util.find_spec(NEEDS[kind]) is None:
        raise ConfigError(
            f"{where} = {source}: is read by {NEEDS[kind]}, which is not installed; "
            f"try: pip install 'shoal[data]'"
        )
    if is_remote(argument) and kind != "mix":
        return  # listed when the run opens it
    if kind in GLOBS and next(_iterate_matches(argument), None) is None:
        _refuse_pattern(argument, where, kind)
    if kind in GLOBS:
        _refuse_empty_files(argument, where, kind)
    if kind in ("images", "hf") and not (path := _folder_of(argument)).is_dir():
        hint = f"is a file; try: {kind}:{path.parent}"
        if not path.exists():
            hint = f"no such folder; {suggest_path(path, kind)}"
        raise ConfigError(f"{where} = {source}: {hint}")
    if kind == "mix":
        for _, part in split_mixture(argument, where):
            check_data_path(part, where, near)
    if kind == "tokens":
        check_tokens_folder(argument, where)
    if kind == "digits" and importlib.util.find_spec("sklearn") is None:
        raise ConfigError(
            f"{where} = digits: comes with scikit-learn, which is not installed; "
            f"try: pip install 'shoal[digits]'"
        )
    if kind == "function":
        check_function(argument, where, near)


def _refuse_empty_files(pattern: str, where: str, kind: str) -> None:
    files = glob_files(pattern, where, kind)
    if not any(path.stat().st_size for path in files):
        what = "is an empty file" if len(files) == 1 else f"all {len(files)} files are empty"
        raise ConfigError(f"{where} = {kind}:{pattern}: {what}; try: files with data in them")


def _folder_of(argument: str) -> Path:
    """Return the folder before a #SPLIT."""
    return Path(argument.partition("#")[0]).expanduser()


def check_tokens_folder(folder: str, where: str = "data.source") -> None:
    """Refuse a folder of tokens that is missing, is a file, or holds no train*.npy or train*.bin.

    Raises:
        ConfigError: with the nearest path; `where` is the key in its message.
    """
    path = Path(folder).expanduser()
    if path.is_file():
        raise ConfigError(
            f"{where} = tokens:{folder}: is a file; try: tokens:{path.parent} (holding "
            f"train*.npy or train*.bin)"
        )
    if not path.is_dir():
        raise ConfigError(
            f"{where} = tokens:{folder}: no such folder; {suggest_path(path, 'tokens')}"
        )
    if not list_token_files(path, "train"):
        names = sorted(os.listdir(path))
        shown = f"has {', '.join(names[:3])}{', …' if len(names) > 3 else ''}" if names else "empty"
        raise ConfigError(
            f"{where} = tokens:{folder}: no train*.npy or train*.bin there ({shown}); try: "
            f"train.npy or train.bin as the names of the training files"
        )


def list_token_files(folder: Path, part: str) -> list[Path]:
    """Return the files of one part, `train` or `val`, sorted: those named PART*.npy and PART*.bin.

    The list is empty if there are none.
    """
    return sorted(p for p in folder.glob(f"{part}*") if p.suffix in (".npy", ".bin"))


def parse_validation_share(section: DataSection) -> tuple[float, str]:
    """Parse `data.validation` as (share, ""), or as (0.0, text) if it names a second source.

    Raises:
        ConfigError: a share outside 0 … 1 (1 excluded), or a text that is no source. It does not
            check that the source exists.

    >>> parse_validation_share(DataSection(validation="0.1"))
    (0.1, '')
    """
    try:
        share = float(section.validation)
    except ValueError:
        if section.validation[:1].isdigit():
            raise ConfigError(
                f"data.validation = {section.validation}: neither a share such as 0.05 nor a source"
            ) from None
        split_source(section.validation, "data.validation")
        return 0.0, section.validation
    if not 0 <= share < 1:
        raise ConfigError(
            f"data.validation = {section.validation}: a share is at least 0 and below 1; try: "
            f"data.validation={0 if not share > 0 else 0.5}"
        )
    return share, ""


def check_tokenizer(spec: str) -> None:
    """Refuse a `data.tokenizer` that is neither bpe:VOCABULARY, at least 257, nor an existing file.

    Raises:
        ConfigError: with the nearest.
    """
    size = spec.removeprefix("bpe:")
    if size == spec:
        path = Path(spec).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"data.tokenizer = {spec}: no such file, and not bpe:VOCABULARY; "
                f"{suggest_path(path)}"
            )
    elif not size.isdecimal() or int(size) < LEAST_VOCABULARY:
        raise ConfigError(
            f"data.tokenizer = {spec}: the vocabulary is a whole number of at least "
            f"{LEAST_VOCABULARY} (256 bytes, end of text); try: bpe:{LEAST_VOCABULARY}"
        )


def refuse_packing(source: str) -> NoReturn:
    """Raise ConfigError for packing of data that has no examples to pack."""
    raise ConfigError(
        f"data.packing = on: packs the examples of jsonl:, parquet: or hf: rows with messages, or "
        f"with prompt and completion; data.source = {source} has none; try: data.packing=off"
    )


def reads_tokens(source: str, where: str = "data.source") -> bool:
    """Return whether a source, or a part of a mixture, is a folder of tokens.

    >>> reads_tokens("mix:0.5*tokens:a+0.5*stdlib"), reads_tokens("stdlib")
    (True, False)
    """
    kind, argument = split_source(source, where)
    if kind == "mix":
        return any(reads_tokens(part, where) for _, part in split_mixture(argument, where))
    return kind == "tokens"


def check_data(section: DataSection, near: Path | None = None) -> None:
    """Refuse the first invalid key of [data], before anything is opened or imported.

    It checks that files, folders, modules and scikit-learn exist, the tokenizer (for text only),
    dtype (for tokens only), sequence, workers, and the module of collate.

    Args:
        near: as in `check_function`.

    Raises:
        ConfigError: one line.
    """
    check_data_path(section.source, near=near)
    second = parse_validation_share(section)[1]
    if second:
        check_data_path(second, "data.validation", near)
    kind = split_source(section.source)[0]
    if kind in (*TEXTS, "mix"):
        check_tokenizer(section.tokenizer)
    if section.packing == "on" and kind not in (*ROWS, "mix"):
        refuse_packing(section.source)
    if section.dtype != "auto" and not (
        reads_tokens(section.source) or (second and reads_tokens(second, "data.validation"))
    ):
        raise ConfigError(
            f"data.dtype = {section.dtype}: is of the .bin files of tokens:FOLDER; data.source = "
            f"{section.source} has none; try: data.dtype=auto"
        )
    if section.sequence < 1:
        raise ConfigError(f"data.sequence = {section.sequence}: must be at least 1 token")
    if section.workers < 0:
        raise ConfigError(f"data.workers = {section.workers}: must be at least 0 processes")
    if section.collate:
        check_function(section.collate, "data.collate", near)
