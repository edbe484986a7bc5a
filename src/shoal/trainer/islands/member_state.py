"""Checkpoints of an island whose fellow islands come and go: given to others, taken from them.

    state/round/ROUND/DIGEST   step of the checkpoint with these merged weights
    state/history              digest of each round that the island committed
    state/STEP/NAME/RANGES     bytes of a file of it, in pieces with a hash each (`member_links.py`)

The manifest has a hash of every slice, so a restore finds what was altered anywhere on the way. The
copy is complete before it is called step-N. The ranks of an island share a disk: rank 0 copies the
files of all, and then all of them restore.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from shoal.base.errors import CheckpointError, ClusterError, ConfigError
from shoal.base.runlog.atomic_files import write_atomically
from shoal.base.runlog.damaged_lines import read_object
from shoal.base.runlog.events import Emit
from shoal.checkpoint.format.folders import fsync_folder, make_temporary_path, quarantine
from shoal.checkpoint.format.listing import list_checkpoints, read_manifest, step_folder
from shoal.fabric import World
from shoal.fabric.islands.member_links import MemberLinks
from shoal.islands.changing.change_merge import join_digests
from shoal.islands.changing.island_addresses import ADDRESSES, TURN, read_later_turn
from shoal.islands.changing.member_driver import STATE
from shoal.islands.changing.round_history import (
    HistoryFork,
    decode_history,
    encode_history,
    find_fork,
    read_history,
)
from shoal.islands.membership.committed_turn import CommittedTurn, is_witness
from shoal.islands.membership.message_json import decode_message, encode_message
from shoal.islands.sample_ranges import SampleStream
from shoal.trainer.islands.checkpoint_copy import copy_checkpoint, read_ranges
from shoal.trainer.islands.island_join import IslandConnection, list_held_rounds
from shoal.trainer.run import Run
from shoal.wire.phases import phase

HEAL_TRY_S = 0.3

STARTS = "starts.json"
"""File of the run folder: the number of the island's last start."""


def read_held_turn(record: dict[str, object]) -> CommittedTurn | None:
    """Return the committed turn that a checkpoint's record of islands holds.

    A checkpoint of islands with a fixed list is a turn without seats.
    """
    kept = record.get("islands")
    if not isinstance(kept, dict):
        return None
    if found := kept.get("members"):
        turn = decode_message(found)
        if not isinstance(turn, CommittedTurn):
            raise CheckpointError(f"the islands' members are damaged: {str(found)[:80]}")
        return turn
    stream = SampleStream.from_json(kept["stream"])
    round_number = int(kept["round"])
    return CommittedTurn(-1, round_number, round_number, str(kept["digest"]), (), 0, (), (), stream)


class MemberCheckpoints:
    """Checkpoints of one island, by their merged weights.

    `restore_newest` and `heal` are collectives of the island's ranks.

    Args:
        ranks: world of the island's ranks, for the training threads.
        wait_s: longest wait for an island that has a state.

    Attributes:
        held: digest of the merged weights of the newest checkpoint.
        restored: turn of the newest checkpoint at this start; None without one.
        has_newer: whether the members went on from a turn, as the first rank knows it.
    """

    def __init__(self, run: Run, joined: IslandConnection, ranks: World, wait_s: float) -> None:
        if run.recorder.folder is None:
            raise ConfigError("islands.least: islands that come and go need a run folder")
        self.run, self.joined, self.ranks, self.wait_s = run, joined, ranks, wait_s
        self.root: Path = run.recorder.folder / "checkpoints"
        self.links: MemberLinks | None = None
        self.held = ""
        self.restored: CommittedTurn | None = None
        self._aside: Path | None = None
        self._history = b""
        self._renamed: dict[str, str] = {}
        self._addresses: dict[int, str] = {}
        self.has_newer: Callable[[CommittedTurn], bool] = lambda fact: False
        self._lock = threading.Lock()

    def holds(self, fact: CommittedTurn) -> bool:
        """Return whether the weights of a turn are on this island's disk, or need not be."""
        return self.held == fact.weights

    def restore_newest(self, emit: Emit) -> CommittedTurn | None:
        """Restore the newest checkpoint that can be read; return its turn, None without one."""
        here = [found.step for found in list_checkpoints(self.root)]
        for step in self.ranks.broadcast_json(here):
            folder, turn, problem = step_folder(self.root, step), None, ""
            try:
                turn = read_held_turn(read_manifest(folder).record)
                if turn is None:
                    raise ConfigError(
                        f"islands.least: {folder} is of a run without islands; try: one round "
                        f"with islands.least=0 first"
                    )
                self.run.restore(step=step)
            except CheckpointError as failure:
                problem = str(failure)
            if self.ranks.all_true(turn is not None and not problem) and turn is not None:
                turn = self._rename_fixed(turn)
                self.held = turn.weights  # a later turn that is found has the same
                self.restored = self.find_later(turn)
                return self.restored
            if self.ranks.is_first:
                emit("notice", text=f"{problem}; kept as {quarantine(folder).name}")
            self.ranks.all_true(True)
        self.run.recorder.cut(0)
        return self.find_later(None)

    def keep_turn(self, fact: CommittedTurn) -> None:
        """Write down a turn whose weights a checkpoint has: its seats decide the next one.

        Without it a restarted island would decide with the members of an earlier turn, beside those
        of the newest one.

        Raises:
            CheckpointError: the disk does not take it, so this island may not vote.
        """
        if self.ranks.is_first:
            file = self.root.parent / TURN
            try:
                write_atomically(file, json.dumps({"turn": encode_message(fact)}))
                with file.open("rb") as written:
                    os.fsync(written.fileno())
                fsync_folder(file.parent)
            except OSError as failure:
                raise CheckpointError(
                    f"{file}: {failure}; so this island may not vote; try: mend that, and resume: "
                    f"the others go on meanwhile"
                ) from failure

    def keep_addresses(self) -> None:
        """Write down the addresses of the other islands: a resume looks for them there."""
        links = self.links
        if not self.ranks.is_first or links is None:
            return
        found = {
            name: at
            for name, at in sorted(links.addresses.copy().items())
            if name != links.name and not is_witness(name)
        }
        if found != self._addresses:
            with contextlib.suppress(OSError):  # without it, a resume asks the user for them
                write_atomically(self.root.parent / ADDRESSES, json.dumps({"at": found}))
                self._addresses = found

    def find_later(self, turn: CommittedTurn | None) -> CommittedTurn | None:
        """Return the turn of `keep_turn` if it is later, and has the weights of a checkpoint.

        Args:
            turn: of the newest checkpoint; None: there is none, and all have their first weights.
        """
        found = read_later_turn(self.root.parent)
        if found is None:
            return turn
        weights, number = ("", (-1, -1)) if turn is None else (turn.weights, turn[:2])
        return found if found.weights == weights and found[:2] > number else turn

    def _rename_fixed(self, turn: CommittedTurn) -> CommittedTurn:
        """Name the merged weights of a fixed list as islands that come and go name them.

        A fixed list hashes the parts of its layout, these islands hash canonical units.
        """
        if turn.session >= 0:
            return turn
        digest = self.joined.compute_digest()
        self._renamed[turn.weights] = digest
        return turn._replace(weights=digest)

    def count_start(self, held: CommittedTurn | None, name: int) -> int:
        """Return the number of this start of the island, above those of all earlier ones.

        It is the time in milliseconds, and more than the last number if the clock was set back. If
        the disk was emptied too, the driver learns the last number from the others.

        Args:
            held: the newest turn on the disk · name: the number of the island.
        """
        number = None
        if self.ranks.is_first:
            file, seat = self.root.parent / STARTS, None if held is None else held.seat_of(name)
            last = read_object(file).get("last", 0)
            earlier = [0 if seat is None else seat.boot, last if isinstance(last, int) else 0]
            number = max(int(time.time() * 1000), *(one + 1 for one in earlier))
            with contextlib.suppress(OSError):  # a full disk: the clock is most likely right
                write_atomically(file, json.dumps({"last": number}))
        return int(self.ranks.broadcast_json(number))

    def provide(self, key: str, offset: int, length: int) -> tuple[int, bytes] | None:
        """Return bytes of a checkpoint for another island; called in other threads."""
        match key.removeprefix(STATE).split("/"):
            case ["history"]:
                if not offset:  # later pieces are of the same bytes
                    self._history = encode_history(read_history(self.root.parent))
                return len(self._history), self._history[offset : offset + length]
            case ["round", number, digest]:
                text = self._find_step(number, digest)
                return None if text is None else (len(text), text[offset : offset + length])
            case [step, name, ranges] if step.isdecimal() and name == Path(name).name:
                file = step_folder(self.root, int(step)) / name
                return read_ranges(file, ranges, offset, length)
        return None

    def _find_step(self, number: str, digest: str) -> bytes | None:
        """Return the step of a checkpoint as text, None if it is not complete here."""
        with self._lock, contextlib.suppress(OSError, CheckpointError):
            kept = list_held_rounds(self.root.parent, self.joined.policy.period).get(number)
            if kept is None or self._renamed.get(kept[0], kept[0]) != digest:
                return None
            read_manifest(step_folder(self.root, kept[1]))
            return str(kept[1]).encode()
        return None

    @phase("load the state of another island")
    def heal(self, fact: CommittedTurn) -> bool:
        """Load the state of a turn, from this island's disk or from an island that has it.

        Returns:
            Whether it is loaded; False: a stop was asked for, or no island has it and the members
            went on.

        Raises:
            ClusterError: no island gives it within `wait_s`.
        """
        if fact.round == 0:
            return True  # all islands begin with these weights
        until_s, problem = time.monotonic() + self.wait_s, "none has saved it"
        while True:
            found = self._find_or_copy(fact, problem) if self.ranks.is_first else None
            ends = time.monotonic() > until_s, self.run.stop_wanted or self.has_newer(fact)
            (step, problem), (is_late, stops) = self.ranks.broadcast_json([found, ends])
            if step >= 0:
                problem = self._restore(fact, step)
                if not problem:
                    return True
            if stops:
                return False
            if is_late:
                raise ClusterError(
                    f"islands: no island gave the state of round {fact.round} within "
                    f"{self.wait_s:g} s: {problem}; try: --resume when another island is there"
                )
            time.sleep(HEAL_TRY_S)

    def check_history(self, fact: CommittedTurn, own: CommittedTurn | None, *, heals: bool) -> None:
        """Keep this island's own checkpoints if a turn is of another history of the run.

        A collective of the island's ranks. `heal` moves the checkpoints, once it has the turn's
        weights.

        Args:
            fact: a turn that this island takes · own: its newest one; None: that of its disk.
            heals: it takes the weights of another island.

        Raises:
            ConfigError: the other islands begin anew, and this one has rounds.
        """
        own = own or self.restored
        if own is None or not own.round or not 0 <= own.session != fact.session:
            return
        if fact.round and not heals:
            return
        if fact.round == 0:
            raise ConfigError(
                f"islands: the others begin a new run at round 0, and this island has "
                f"{own.round} rounds ({self.root.parent}), so nothing is replaced; try: stop the "
                f"others, and start them with empty run folders beside this island; or another "
                f"run.name here, for the new run"
            )
        if self.ranks.is_first and self._aside is None:
            fork = self._find_fork(fact, own)
            if fork is not None:
                self._announce_fork(fork, fact)
        self.ranks.all_true(True)

    def _find_fork(self, fact: CommittedTurn, own: CommittedTurn) -> HistoryFork | None:
        """Return the rounds of this island that the other islands' history lacks."""
        links, other = self.links, dict[int, str]()
        last = own.round - 1  # events number rounds from 0
        mine = {last: own.weights} | read_history(self.root.parent)
        names = dict.fromkeys(
            [*fact.committers, *fact.names(), *(links.addresses if links else ())]
        )
        for name in names:
            if links is None or name == links.name or is_witness(name) or last in other:
                continue
            with contextlib.suppress(OSError, ConfigError, KeyError, ValueError):
                if found := links.fetch(name, f"{STATE}history"):
                    other = decode_history(found) | other
        return find_fork(mine, other | {fact.round - 1: fact.weights}, last)

    def _announce_fork(self, fork: HistoryFork, fact: CommittedTurn) -> None:
        """Say what happens to this island's rounds and weights, before they are replaced."""
        folder = self.root.parent / f"set-aside-round-{fork.last}"
        while folder.exists():
            folder = folder.with_name(f"{folder.name}-again")
        kept = folder / "checkpoints"
        kept.mkdir(parents=True)
        with contextlib.suppress(OSError):
            shutil.copy(self.root.parent / "run.toml", folder)
        self._aside = kept
        self.run.recorder.events.emit(
            "rounds_dropped",
            first=fork.first,
            last=fork.last,
            goes_on=fact.round,
            known=fork.is_known,
            folder=str(folder),
        )

    def _drop(self, checkpoint: Path) -> None:
        """Move a checkpoint away that the run does not need; of another history, keep it."""
        aside = None if self._aside is None else self._aside / checkpoint.name
        checkpoint.rename(aside or make_temporary_path(checkpoint))

    def _find_or_copy(self, fact: CommittedTurn, problem: str) -> tuple[int, str]:
        """Return the step of a turn's checkpoint on this disk, −1 and a reason without one."""
        try:
            kept = list_held_rounds(self.root.parent, self.joined.policy.period)
            digest, step = kept.get(str(fact.round), ("", 0))
            digest = self._renamed.get(digest, digest)
            return (step if digest == fact.weights else self._copy(fact)), problem
        except (OSError, CheckpointError) as failure:
            return -1, str(failure)

    def _restore(self, fact: CommittedTurn, step: int) -> str:
        """Restore a checkpoint on all ranks; return why it is not the turn's, "" if it is."""
        problem = ""
        try:
            self.run.restore(step=step)
        except CheckpointError as failure:
            problem = str(failure)
        told = self.ranks.gather_json([self.joined.common.outer.list_digests(), problem])
        digest = join_digests(one for one, _ in told)
        problem = next((why for _, why in told if why), "")
        if not problem and digest != fact.weights:
            problem = f"step-{step}: its merged weights are not those of its record"
            if self.ranks.is_first:
                quarantine(step_folder(self.root, step))
        elif not problem:
            self.held = fact.weights
            for other in list_checkpoints(self.root) if self.ranks.is_first else ():
                if other.step > step or (self._aside is not None and other.step != step):
                    self._drop(other.path)
            self._aside = None
        self.ranks.all_true(True)
        return problem

    def _copy(self, fact: CommittedTurn) -> int:
        """Copy the checkpoint of a turn from another island; return its step, −1 if none has it."""
        links = self.links
        if links is None:
            return -1
        first = [*fact.committers, *fact.names()]
        others = dict.fromkeys(name for name in [*first, *links.addresses] if name != links.name)
        for name in others:
            if self.run.stop_wanted:
                break
            with contextlib.suppress(OSError, ConfigError, CheckpointError, KeyError, ValueError):
                found = links.fetch(name, f"{STATE}round/{fact.round}/{fact.weights}")
                if found is None:
                    continue
                self._copy_files(links, name, int(found))
                return int(found)
        return -1

    def _copy_files(self, links: MemberLinks, name: int, step: int) -> None:
        final = step_folder(self.root, step)
        self.root.mkdir(parents=True, exist_ok=True)
        folder = make_temporary_path(final)
        folder.mkdir()

        def fetch(file: str, ranges: str) -> bytes:
            key = f"{STATE}{step}/{file}/{ranges}"
            data = links.fetch(name, key, lambda: self.run.stop_wanted)
            if data is None:
                raise FileNotFoundError(f"island {name} has no {file} of step {step} any more")
            return data

        try:
            copy_checkpoint(folder, fetch)
            if final.exists():
                self._drop(final)
            folder.rename(final)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
