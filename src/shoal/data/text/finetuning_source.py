"""Source of rows with answers: the examples, the held-out part, and the user's line.

rows.py (rows) ──> chat_examples.py (text, answers) ──> finetuning_samples.py (tokens, rows)
"""

from __future__ import annotations

from typing import Any

from shoal.base.errors import ConfigError
from shoal.config.paths import ROWS, split_source
from shoal.config.sections import DataSection
from shoal.data.files.documents import Document
from shoal.data.text.chat_examples import find_template
from shoal.data.text.finetuning_samples import EncodedExamples, ExampleRows, open_examples
from shoal.data.text.text_rows import CHAT, PAIR, find_form, split_row_documents


def open_finetuning(section: DataSection, share: float, second: str) -> dict[str, Any] | None:
    """Open fine-tuning rows as the fields of a `Source`; None if the lines are text.

    Args:
        second: another source for validation, which must be rows with answers too; "": none.

    Raises:
        ConfigError: a line has another form (with file and number), no example has an answer within
            data.sequence, or the second source is of another kind.
    """
    documents, form = _lines(section, section.source, "data.source")
    if form not in (PAIR, CHAT):
        return None
    template = find_template(section.tokenizer)
    encoded = open_examples(documents, form, section.tokenizer, share, template)
    train = ExampleRows(encoded, False, section.sequence, section.packing == "on")
    validation, told = None, train.summary_line()
    if second:
        validation = _second(section, second, encoded, template)
        told += f"; validation: {second}: {validation.summary_line()}"
    elif encoded.held.any():
        validation = ExampleRows(
            encoded, True, section.sequence, section.packing == "on", "held-out"
        )
        told += f"; {validation.examples} held out"
    return {
        "train": train,
        "validation": validation,
        "vocabulary": encoded.vocabulary,
        "tokenizer": encoded.tokenizer,
        "unigram_entropy": None if second else encoded.unigram_entropy,
        "description": f"{section.source.partition(':')[2]}: {told}",
    }


def _lines(section: DataSection, source: str, where: str) -> tuple[list[Document], tuple[str, ...]]:
    documents, _ = split_row_documents(*split_source(source, where), "", 0.0, where)
    return documents, find_form(documents, section.field)


def _second(
    section: DataSection, second: str, first: EncodedExamples, template: str
) -> ExampleRows:
    where = f"data.validation = {second}"
    documents: list[Document] = []
    form: tuple[str, ...] = ()
    if split_source(second, "data.validation")[0] in ROWS:
        documents, form = _lines(section, second, "data.validation")
    if form not in (PAIR, CHAT):
        raise ConfigError(
            f"{where}: has no answers, on which data.source = {section.source} is trained; "
            f"try: rows like those, or a share such as data.validation=0.05"
        )
    trained_here = section.tokenizer.startswith("bpe:")
    tokenizer = first.tokenizer_path if trained_here else section.tokenizer
    encoded = open_examples(documents, form, tokenizer, 0.0, template)
    return ExampleRows(encoded, False, section.sequence, section.packing == "on", "validation")
