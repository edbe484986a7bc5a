"""Data owners of a run (federated clients): their names, and the [data] section of each.

    data.source=jsonl:owners/{owner}.jsonl        a file for each owner: east, north, south
    data.source=tokens:owners/{owner}             a folder for each owner
    data.source=mine:owner_{owner}                a function for each owner: owner_0, owner_1, … or
                                                  those of data.owners
    data.source=digits data.split=even            one dataset, dealt to owners for an experiment

On one machine the names are those of the files or folders. On several (`islands.at`), where nobody
sees the files of the others, an owner is named by its number. `data.owners` names them otherwise.
"""

from __future__ import annotations

import filecmp
import fnmatch
import glob
import math
import re
from dataclasses import replace
from pathlib import Path

from shoal.base.errors import ConfigError
from shoal.config.load import LoadedConfig
from shoal.config.paths import GLOBS, glob_files, is_remote, split_source, suggest_path
from shoal.config.sections import Config, DataSection

OWNER = "{owner}"
"""Place of an owner's name in data.source and data.validation."""
ON_PATHS = (*GLOBS, "tokens", "images", "hf")
"""Kinds of sources that are paths."""
LOCAL = (*GLOBS, "tokens", "images")
"""Kinds of sources whose paths are always on this disk; a name after `hf:` may be one of a hub."""
SPLITS, SPLIT_FORMS = ("even", "labels", "dirichlet"), "even, labels:1 or dirichlet:0.1"


def resolve_owners(loaded: LoadedConfig) -> None:
    """Set islands.count to the number of data owners that data.source names, if it is left open.

    Raises:
        ConfigError: owners without data of their own, data of owners without
            islands.data=own, or another number of owners than islands.count.
    """
    data, islands = loaded.config.data, loaded.config.islands
    if not islands.owned:
        _refuse_own_data(data)
        return
    _check_names(data)
    if data.split and OWNER in data.source:
        raise ConfigError(
            f"data.split = {data.split}: deals one dataset to owners, and data.source = "
            f"{data.source} has one for each; try: leave data.split out"
        )
    _check_functions(loaded.config)
    if islands.at and islands.concurrent:
        raise ConfigError(
            f"islands.concurrent = {islands.concurrent}: owners that train in turn are on one "
            f"machine, and islands.at = {islands.at} is of several; try: leave one of them out"
        )
    if islands.at:
        if data.owners:
            _check_count(loaded, data.owners)
            find_owner_files(data, data.owners[islands.index : islands.index + 1])
        return
    if not data.split and OWNER not in data.source:
        raise ConfigError(
            f"data.source = {data.source}: is the same for all owners; try: {OWNER} in the path, "
            f"as in jsonl:owners/{OWNER}.jsonl, or data.split=even to deal one dataset"
        )
    names = data.owners or (glob_owner_names(data.source) if OWNER in data.source else ())
    if not names:
        return
    if "islands.count" not in loaded.origins:
        loaded.replace("islands", "of data.source", count=len(names))
        loaded.config.islands.resolved()  # raises for a merge that needs more owners
    else:
        _check_count(loaded, names)
    if OWNER in data.source:
        loaded.notices.extend(_compare_owner_files(find_owner_files(data, names)))


def _check_count(loaded: LoadedConfig, names: tuple[str, ...]) -> None:
    """Refuse a number of names that is not the number of data owners."""
    data, islands = loaded.config.data, loaded.config.islands
    if islands.count != len(names):
        raise ConfigError(
            f"islands.count = {islands.count}: data.{'owners' if data.owners else 'source'} names "
            f"{len(names)} owners ({', '.join(names[:6])}{', …' if len(names) > 6 else ''}); try: "
            f"islands.count={len(names)}{_suggest_missing_files(data, islands.count, len(names))}"
        )


def _suggest_missing_files(data: DataSection, count: int, found: int) -> str:
    """Return the other remedy, if there are fewer files than data owners."""
    if data.owners or found >= count:
        return ""
    return f", or add the data of {count - found} more owner{'s' * (count - found > 1)}"


def find_owner_files(data: DataSection, names: tuple[str, ...]) -> dict[str, list[Path]]:
    """Return each data owner's files or folder; {} for a source that is not on this disk.

    Raises:
        ConfigError: an owner has none. The line suggests no path: a similar one is another owner's.
    """
    kind = data.source.partition(":")[0]
    if kind not in LOCAL or OWNER not in data.source or is_remote(data.source):
        return {}
    found = {}
    for name in names:
        source = data.source.replace(OWNER, name)
        pattern = split_source(source)[1]
        paths = sorted(map(Path, glob.glob(str(Path(pattern).expanduser()), recursive=True)))
        if not paths:
            raise ConfigError(
                f"data.source = {source}: owner {name} has no file there; try: put the data of "
                f"{name} there, or leave {name} out of data.owners"
            )
        found[name] = paths
    return found


def _compare_owner_files(files: dict[str, list[Path]]) -> list[str]:
    """Return a line for each data owner whose only file has the bytes of another owner's.

    Raises:
        ConfigError: two owners have the same file, by one path or by links.
    """
    paths: dict[Path, str] = {}
    sizes: dict[int, list[tuple[str, Path]]] = {}
    lines = []
    for name, path in ((name, path) for name, found in files.items() for path in found):
        other = paths.setdefault(path.resolve(), name)
        if other != name:
            raise ConfigError(
                f"data.source: owners {other} and {name} have the same file {path.resolve()}: "
                f"its samples would count twice; try: a file of its own for each owner"
            )
        if not path.is_file() or not (size := path.stat().st_size):
            continue
        alike = sizes.setdefault(size, [])
        for first, copy in alike:
            if first != name and filecmp.cmp(copy, path, shallow=False):
                lines.append(
                    f"data.source: {path} of owner {name} is equal to {copy} of owner {first}: "
                    f"its samples count twice"
                )
                break
        else:
            alike.append((name, path))
    return lines


def _check_functions(config: Config) -> None:
    """Refuse a name of a data owner with which `{owner}` in pkg.mod:function is no function.

    Raises:
        ConfigError: shows the name that was put in.
    """
    source = config.data.source
    if OWNER not in source or source.partition(":")[0] in ON_PATHS:
        return
    for name in list_owner_names(config):
        if not _is_source(source.replace(OWNER, name)):
            lettered = source.replace(OWNER, f"p{OWNER}")
            near = "names of letters, digits and _ in data.owners"
            if _is_source(lettered.replace(OWNER, name)):
                near = f"data.source={lettered}, or names in data.owners"
            raise ConfigError(
                f"data.source = {source}: of owner {name} it is {source.replace(OWNER, name)}, "
                f"and that names no function; try: {near}"
            )


def name_owner(config: Config, section: DataSection, error: ConfigError) -> ConfigError:
    """Return an error about the function of a data owner with the owner's name.

    Its remedy suggests no similar function, which would be another owner's. Other errors stay.

    Args:
        section: of `list_data_sections`.
    """
    source = config.data.source
    if OWNER not in source or source.partition(":")[0] in ON_PATHS:
        return error
    names = [n for n in list_owner_names(config) if source.replace(OWNER, n) == section.source]
    if not names:
        return error
    text = str(error).partition("; try: ")[0]
    return ConfigError(
        f"owner {names[0]}: {text}; try: add the function of {names[0]}, or change the names in "
        f"data.owners"
    )


def _is_source(text: str) -> bool:
    """Return whether a text has the form of a data source."""
    try:
        split_source(text)
    except ConfigError:
        return False
    return True


def _refuse_own_data(data: DataSection) -> None:
    """Refuse keys for the data of several owners in a run without data owners."""
    for key, value in (("source", data.source), ("split", data.split)):
        if OWNER in value or (key == "split" and value):
            raise ConfigError(
                f"data.{key} = {value}: gives each owner data of its own; try: "
                f"islands.data=own islands.method=fedavg"
            )


def _check_names(data: DataSection) -> None:
    """Refuse names that are twice there or parts of a path, and a split that is none."""
    twice = [name for name in data.owners if data.owners.count(name) > 1]
    if twice:
        raise ConfigError(
            f"data.owners = {','.join(data.owners)}: has {twice[0]} more than once; try: "
            f"data.owners={','.join(dict.fromkeys(data.owners))}"
        )
    for name in data.owners:
        if not name or set(name) & set(":/\\"):
            raise ConfigError(
                f"data.owners = {','.join(data.owners)}: {name!r} is no plain name; try: letters "
                f"and numbers, as in data.owners=east,north"
            )
    if data.split:
        parse_split(data.split)


def list_owner_names(config: Config) -> tuple[str, ...]:
    """Return the names of all data owners, by number; "0", "1", … if no files name them."""
    names = config.data.owners
    if not names and OWNER in config.data.source and not config.islands.at:
        names = glob_owner_names(config.data.source)
    return names or tuple(str(number) for number in range(config.islands.count))


def glob_owner_names(source: str) -> tuple[str, ...]:
    """Return the data owners for whose names `{owner}` stands, by their numbers and letters.

    () for a source that is no path.

    Raises:
        ConfigError: no file or folder matches.
    """
    kind, argument = split_source(source) if source.partition(":")[0] in ON_PATHS else ("", "")
    if not kind:
        return ()
    parts = Path(argument).expanduser().parts
    at = next(place for place, part in enumerate(parts) if OWNER in part)
    folder = Path(*parts[:at]) if at else Path()
    head, _, tail = parts[at].partition(OWNER)
    pattern = re.compile(f"{fnmatch.translate(head)[:-2]}(.+?){fnmatch.translate(tail)}")
    found = {
        match[1]
        for path in glob.glob(str(folder / parts[at].replace(OWNER, "*")))
        if (match := pattern.match(Path(path).name))
    }
    if not found:
        if kind in GLOBS:  # raises, with the nearest path
            glob_files(argument.replace(OWNER, "*"), kind=kind)
        raise ConfigError(
            f"data.source = {source}: no owner is there; {suggest_path(folder, kind)}"
        )
    return tuple(sorted(found, key=_sort_key))


def select_owner(section: DataSection, name: str) -> DataSection:
    """Return the [data] section of one data owner.

    >>> select_owner(DataSection(source="jsonl:of/{owner}.jsonl"), "east").source
    'jsonl:of/east.jsonl'
    """
    return replace(
        section,
        source=section.source.replace(OWNER, name),
        validation=section.validation.replace(OWNER, name),
    )


def list_data_sections(config: Config) -> list[DataSection]:
    """Return the [data] section of every data owner on this machine; without owners, the run's."""
    if not config.islands.owned:
        return [config.data]
    names = list_owner_names(config)
    if config.islands.at:
        names = (names[config.islands.index],)
    elif OWNER not in config.data.source + config.data.validation:
        names = names[:1]
    return [select_owner(config.data, name) for name in names]


def parse_split(split: str) -> tuple[str, float]:
    """Return the kind and the number of a `data.split`.

    Raises:
        ConfigError: it is none.

    >>> parse_split("even"), parse_split("dirichlet:0.1")
    (('even', 0.0), ('dirichlet', 0.1))
    """
    kind, colon, text = split.partition(":")
    try:
        number = float(text) if colon else 0.0
    except ValueError:
        number = -1.0
    sound = kind in SPLITS and (bool(colon) != (kind == "even"))
    if kind == "labels":
        sound = sound and number >= 1 and number == int(number)
    elif kind == "dirichlet":
        sound = sound and 0 < number < math.inf
    if not sound:
        near = {"labels": "labels:1", "dirichlet": "dirichlet:0.1"}.get(kind, "even")
        raise ConfigError(f"data.split = {split}: {SPLIT_FORMS} is wanted; try: data.split={near}")
    return kind, number


def _sort_key(name: str) -> list[tuple[int, int, str]]:
    """Return a key by which 9 comes before 10, and numbers before letters."""
    return [
        (0, int(part), "") if part.isdecimal() else (1, 0, part)
        for part in re.split(r"(\d+)", name)
        if part
    ]
