"""Fine-tuning examples as samples: loss on answers only, padded, or packed several to a row.

    example   t0 t1 t2 | t3 t4            answer t3 t4
    sample    inputs   t0 t1  t2 t3  pad pad          data.sequence = 6
              targets  −    −   t3 t4  −   −          − is −100: no loss
    packed    a second example t5 | t6 t7 in the same row:
              inputs     t0 t1 t2 t3 t5 t6
              targets     −  − t3 t4 t6 t7            never the next example's first token
              positions   0  1  2  3  0  1            a document begins at each 0

The model gets packed rows as {"input_ids", "position_ids"}. Tokens of different documents do not
attend to each other; padding at a row's end is a document of its own. Rows are filled by best fit
of the longest first, the same in every epoch; the loader orders the rows. Source packing without
cross-contamination: Krell et al. 2021 (2107.02027); best fit of the
            longest first: Johnson 1974, at most 11/9 of the fewest rows and a bit
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from shoal.base.errors import ConfigError
from shoal.data.files.documents import Document, hash_fraction
from shoal.data.files.token_files import cross_entropy, pad_counts
from shoal.data.files.tokenizer_cache import NewEntry, content_key, open_cached
from shoal.data.text.chat_examples import Example, Render, iter_examples, load_template, plain_end
from shoal.data.text.single_pass_text import TRAIN_CHARACTERS
from shoal.data.text.text_files import END_NAMES, load_tokenizer, tokenizer_cache_key, train_bpe_on
from shoal.data.text.text_rows import CHAT, iter_rows
from shoal.wire.phases import iter_with_progress

IGNORED = -100
MASKED_BY = "what holds no character of an answer"
"""Part of a cache entry's name: entries of another masking rule are made again."""
ENCODE_AT_ONCE = 1024

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EncodedExamples:
    """Examples as tokens: those of example e are ends[e − 1] to ends[e].

    ids [tokens] · is_answer [tokens] bool · ends [examples] · held [examples] bool
    """

    ids: npt.NDArray[Any]
    is_answer: npt.NDArray[np.bool_]
    ends: Ints
    held: npt.NDArray[np.bool_]
    tokenizer: Any
    tokenizer_path: str
    vocabulary: int
    unigram_entropy: float
    pad: int


def answer_mask(offsets: Sequence[tuple[int, int]], example: Example) -> list[bool]:
    """Return which tokens contain characters of an answer, from each token's characters.

    A token across the border belongs to the answer: after a prompt that ends in a space, BPE joins
    the space to the answer's first word, which would otherwise never be trained.

    >>> answer_mask([(0, 2), (2, 5), (5, 9), (9, 10)], Example("hi Bob, you", ((3, 9),)))
    [False, True, True, False]
    """
    return [any(start < stop and a < end for a, stop in example.answers) for start, end in offsets]


def open_examples(
    documents: list[Document],
    form: tuple[str, ...],
    tokenizer: str,
    share: float,
    template: str,
) -> EncodedExamples:
    """Open the examples of JSON lines, from the cache or encoded now; hold out a `share`.

    Args:
        template: folder of a chat template, "" for the plain one; see `find_template`.

    Raises:
        ConfigError: a line has another form; with file and number.

    Note:
        During encoding all examples are in memory as text.
    """
    folder = template if form == CHAT else ""
    recipe = [tokenizer_cache_key(tokenizer), form, share, _template_recipe(folder), MASKED_BY]
    key = content_key([d.recipe() for d in documents], recipe)

    def build(entry: NewEntry) -> dict[str, Any]:
        render = load_template(folder) if folder else None
        return _build(entry, documents, form, tokenizer, share, render)

    made, about = open_cached("examples", key, build)
    arrays = {
        name: np.load(made / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        for name in ("ids", "is_answer", "ends", "held")
    }
    path = made / "tokenizer.json"
    return EncodedExamples(
        **arrays, tokenizer=load_tokenizer(path), tokenizer_path=str(path), **about
    )


def _template_recipe(folder: str) -> list[Any]:
    names = ("chat_template.jinja", "tokenizer_config.json") if folder else ()
    paths = [Path(folder, name) for name in names]
    return [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in paths if p.is_file()]


def _build(
    entry: NewEntry,
    documents: list[Document],
    form: tuple[str, ...],
    spec: str,
    share: float,
    render: Render | None,
) -> dict[str, Any]:
    end = plain_end(spec)
    if not end:
        tokenizer = load_tokenizer(Path(spec).expanduser())
        end = next((name for name in END_NAMES if tokenizer.token_to_id(name) is not None), "")
    rows = (row for document in documents for row in iter_rows(document, form))
    found = list(iter_examples(rows, form, end, render))
    held = _held_out(found, share)
    if spec.startswith("bpe:"):
        texts = [e.text.replace(end, "") for e, out in zip(found, held, strict=True) if not out]
        share = min(1.0, TRAIN_CHARACTERS / max(1, sum(map(len, texts))))
        some = (t for n, t in enumerate(texts) if int((n + 1) * share) > int(n * share))
        tokenizer = train_bpe_on(some, int(spec[4:]))
    tokenizer.save(str(entry.folder / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab_size()
    ids, is_answer = _encode(tokenizer, found)
    sizes = np.array([len(one) for one in ids], dtype=np.int64)
    joined = np.concatenate(ids)
    mask = np.concatenate(is_answer)
    arrays = {"ids": joined, "is_answer": mask, "ends": sizes.cumsum(), "held": held}
    for name, array in arrays.items():
        entry.save_array(name, array)
    out = np.repeat(held, sizes)
    counts = [
        pad_counts(np.bincount(joined[mask & side]), vocabulary)
        for side in (~out, out if held.any() else ~out)
    ]
    pad = tokenizer.token_to_id(end) if end else 0
    entropy = cross_entropy(counts[0], counts[1])
    return {"vocabulary": vocabulary, "unigram_entropy": entropy, "pad": pad}


def _encode(
    tokenizer: Any, found: list[Example]
) -> tuple[list[npt.NDArray[Any]], list[npt.NDArray[np.bool_]]]:
    """Encode every example and mark the answers' tokens; the whole text is encoded at once."""
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
    ids, masks = [], []
    for start in iter_with_progress("encode", len(found), range(0, len(found), ENCODE_AT_ONCE)):
        some = found[start : start + ENCODE_AT_ONCE]
        encoded = tokenizer.encode_batch([e.text for e in some], add_special_tokens=False)
        for example, one in zip(some, encoded, strict=True):
            ids.append(np.asarray(one.ids, dtype=dtype))
            masks.append(np.asarray(answer_mask(one.offsets, example), dtype=bool))
    return ids, masks


def _held_out(found: list[Example], share: float) -> npt.NDArray[np.bool_]:
    """Return which examples are held out, by a hash; at least one of two, equal ones together."""
    places = np.array([hash_fraction(example.text) for example in found])
    if share <= 0 or len(found) < 2:
        return np.zeros(len(found), dtype=bool)
    ranked = np.sort(places)
    count = min(max(1, int((places < share).sum())), len(found) - 1)
    held: npt.NDArray[np.bool_] = places <= ranked[count - 1]
    return held if not held.all() else np.zeros(len(found), dtype=bool)


def best_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Pack items of some sizes, none above `room`, into rows: longest first, by best fit.

    Returns:
        item numbers, row by row.

    >>> best_fit([3, 5, 2, 4, 1], 6)
    [[1, 4], [3, 2], [0]]
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(room + 1)]
    open_sizes = 0  # bit s: a row has s places left
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        size = sizes[number]
        fitting = open_sizes >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            row = with_room[left].pop()
            if not with_room[left]:
                open_sizes ^= 1 << left
        else:
            left, row = room, len(rows)
            rows.append([])
        rows[row].append(number)
        if left - size:
            with_room[left - size].append(row)
            open_sizes |= 1 << (left - size)
    return rows


class ExampleRows(Dataset[tuple[Any, torch.Tensor]]):
    """Rows of `sequence` tokens, each of one example, or of several if `packed`.

    dataset[i] is (inputs, targets): inputs int64 [sequence], or if packed the model's keywords
    {"input_ids", "position_ids"}, each [sequence]; targets int64 [sequence], −100 for no loss.

    Attributes:
        cut: examples longer than sequence + 1, whose end is left out.
        left_out: examples without an answer in their first sequence + 1 tokens.
        numbers: of each example among all rows of the source's files.
        lengths: tokens of each example, before any cut.

    Raises:
        ConfigError: no example is left; the message names the `part`.
    """

    draws_nothing = True

    def __init__(
        self, encoded: EncodedExamples, held: bool, sequence: int, packed: bool, part: str = "train"
    ) -> None:
        self.ids, self.is_answer, self.pad = encoded.ids, encoded.is_answer, encoded.pad
        self.sequence, self.packed = sequence, packed
        stops = np.asarray(encoded.ends)
        starts = np.concatenate(([0], stops[:-1]))
        mine = np.flatnonzero(np.asarray(encoded.held) == held)
        most = np.minimum(stops, starts + sequence + 1)
        seen = np.concatenate(([0], np.cumsum(encoded.is_answer)))
        answers = seen[most] - seen[np.minimum(starts + 1, most)]  # a first token is no target
        kept = mine[answers[mine] > 0]
        self.left_out = len(mine) - len(kept)
        self.cut = int((stops[kept] > most[kept]).sum())
        if not len(kept):
            longest = int((stops - starts).max(initial=0))
            raise ConfigError(
                f"data.sequence = {sequence}: no example of the {part} part has an answer within "
                f"its first {sequence + 1} tokens; try: data.sequence={max(1, longest - 1)}"
            )
        self.numbers, self.starts, self.stops = kept, starts[kept], most[kept]
        self.lengths = stops[kept] - starts[kept]
        sizes = (self.stops - self.starts - 1).tolist()
        rows = best_fit(sizes, sequence) if packed else [[n] for n in range(len(kept))]
        self.row_ends = np.cumsum([len(row) for row in rows])
        self.order = np.array([number for row in rows for number in row])
        self.examples = len(kept)

    def __len__(self) -> int:
        return len(self.row_ends)

    def summary_line(self) -> str:
        """Return a line for the user: examples, rows, and examples cut or left out."""
        tokens = int((self.stops - self.starts - 1).sum())
        full = tokens / (len(self) * self.sequence)
        parts = [f"{self.examples} examples in {len(self)} rows, {full:.0%} full"]
        if self.cut:
            parts.append(f"{self.cut} cut to {self.sequence + 1} tokens")
        if self.left_out:
            parts.append(f"{self.left_out} left out, with no answer within these")
        return ", ".join(parts)

    def examples_of(self, index: int) -> list[int]:
        """Return the numbers of the examples in one row, in their order there."""
        start = int(self.row_ends[index - 1]) if index else 0
        return [int(n) for n in self.order[start : int(self.row_ends[index])]]

    def __getitem__(self, index: int) -> tuple[Any, torch.Tensor]:
        """Return inputs and targets of one row; may raise IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        inputs = np.full(self.sequence, self.pad, dtype=np.int64)
        targets = np.full(self.sequence, IGNORED, dtype=np.int64)
        positions = np.zeros(self.sequence, dtype=np.int64)
        place = 0
        for number in self.examples_of(index):
            start, stop = int(self.starts[number]), int(self.stops[number])
            size = stop - start - 1
            ids = self.ids[start:stop].astype(np.int64)
            inputs[place : place + size] = ids[:-1]
            answers = self.is_answer[start + 1 : stop]
            targets[place : place + size] = np.where(answers, ids[1:], IGNORED)
            positions[place : place + size] = np.arange(size)
            place += size
        positions[place:] = np.arange(self.sequence - place)
        given: Any = torch.from_numpy(inputs)
        if self.packed:
            given = {"input_ids": given, "position_ids": torch.from_numpy(positions)}
        return given, torch.from_numpy(targets)
