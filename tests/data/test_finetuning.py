"""Fine-tuning: which ids are answers, how rows are padded and packed, what a wrong line says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shoal.base.errors import ConfigError
from shoal.config.load import load_config
from shoal.config.paths import check_data
from shoal.config.sections import DataSection
from shoal.data.sources import open_data, open_source
from shoal.data.text.finetuning_samples import best_fit

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last or m.role == 'user' else m.content.split('/')[-1] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HI = {"role": "user", "content": "hi"}
YO = {"role": "assistant", "content": "hm/yo"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


def lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{path}"


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """A tokenizer of single bytes and three special tokens; its ids are known by hand."""
    folder = tmp_path / "letters"
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def with_template(tokenizer: Path, template: str) -> Path:
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (tokenizer.parent / "tokenizer_config.json").write_text(json.dumps(about))
    return tokenizer


def opened(source: str, tokenizer: Any = "bpe:300", **settings: Any) -> Any:
    given: dict[str, Any] = {"sequence": 64, "validation": "0", **settings}
    return open_source(DataSection(source=source, tokenizer=str(tokenizer), **given), 0)


def shown(source: Any, ids: torch.Tensor) -> str:
    """Tokens as text, one character each, `·` where no loss is, `$` for the end of text."""
    names = ["·" if n == -100 else source.tokenizer.decode([n], False) for n in ids.tolist()]
    short = {"<|endoftext|>": "$", "<|im_start|>": "<", "<|im_end|>": ">", "\n": "/"}
    return "".join(short.get(name, name) for name in names)


def test_masked_ids_equal_a_list_made_by_hand(tmp_path: Path, letters: Path) -> None:
    source = opened(lines(tmp_path / "a.jsonl", {"prompt": "ab", "completion": "cd"}), letters,
                    sequence=6)  # fmt: skip
    inputs, targets = source.train[0]
    a, b, c, d = (letters_id(source, letter) for letter in "abcd")
    end = letters_id(source, "<|endoftext|>")
    assert inputs.tolist() == [a, b, c, d, end, end]
    assert targets.tolist() == [-100, c, d, end, -100, -100]
    assert inputs.dtype == targets.dtype == torch.int64


@pytest.mark.parametrize("form", ["pair", "chat"])
def test_a_space_before_an_answer_does_not_hide_its_first_word(tmp_path: Path, form: str) -> None:
    """BPE joins the space to the word: one token, of which a part is the prompt's."""
    rows = []
    for word in ("red", "green", "blue") * 20:
        turns = [("user", "name one"), ("assistant", word)]
        chat = {"messages": [{"role": role, "content": text} for role, text in turns]}
        rows.append({"prompt": "name one: ", "completion": word} if form == "pair" else chat)
    source = opened(lines(tmp_path / "a.jsonl", *rows), "bpe:300")
    _, targets = source.train[0]
    learnt = source.tokenizer.decode([n for n in targets.tolist() if n >= 0], False)
    assert learnt in {f" {word}<|endoftext|>" for word in ("red", "green", "blue")} | {
        f" {word}<|endoftext|>\n" for word in ("red", "green", "blue")
    }


def letters_id(source: Any, name: str) -> int:
    return int(source.tokenizer.token_to_id(name))


def test_the_plain_form_of_a_chat(tmp_path: Path, letters: Path) -> None:
    again = [{"role": "user", "content": "ok?"}, {"role": "assistant", "content": "ja"}]
    path = lines(tmp_path / "a.jsonl", {"messages": [HI, YO, *again]})
    inputs, targets = (source := opened(path, letters, sequence=56)).train[0]
    assert shown(source, inputs) == "user: hi/assistant: hm/yo$/user: ok?/assistant: ja$$$$$$"
    assert shown(source, targets) == "·················· hm/yo$····················· ja$······"


def test_the_tokenizers_own_template_writes_a_chat(tmp_path: Path, letters: Path) -> None:
    with_template(letters, CHATML)
    path = lines(tmp_path / "a.jsonl", {"messages": [HI, YO, HI, YO]})
    inputs, targets = (source := opened(path, letters)).train[0]
    text = "<user/hi><assistant/hm/yo><user/hi><assistant/hm/yo>".replace(">", ">/")
    assert shown(source, inputs) == text[:-1] + "$" * (64 - len(text) + 1)
    assert shown(source, targets) == (
        "····················hm/yo>/·····················hm/yo>/·········"
    )


def test_a_template_that_writes_answers_anew_is_refused(tmp_path: Path, letters: Path) -> None:
    with_template(letters, THINKS)
    path = lines(tmp_path / "a.jsonl", {"messages": [HI, YO]}, {"messages": [HI, YO, HI, YO]})
    with pytest.raises(ConfigError) as caught:
        opened(path, letters)
    assert str(caught.value) == (
        f"{tmp_path}/a.jsonl:2: the tokenizer's chat template writes earlier turns anew once "
        f"others follow, so turn 2 is no answer to what was asked; try: a line for each "
        f"answer, its last turn"
    )


def test_packed_rows_by_hand(tmp_path: Path, letters: Path) -> None:
    rows = [{"prompt": "ab", "completion": "c"}, {"prompt": "d", "completion": "e"},
            {"prompt": "fghi", "completion": "jk"}]  # fmt: skip
    source = opened(lines(tmp_path / "a.jsonl", *rows), letters, sequence=7, packing="on")
    assert [source.train.examples_of(row) for row in range(len(source.train))] == [[2], [0, 1]]
    (first, wanted), (second, other) = source.train[0], source.train[1]
    assert shown(source, first["input_ids"]) == "fghijk$"
    assert shown(source, wanted) == "···jk$·"
    assert first["position_ids"].tolist() == [0, 1, 2, 3, 4, 5, 0]
    assert shown(source, second["input_ids"]) == "abcde$$"
    assert shown(source, other) == "·c$e$··"
    assert second["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert source.description.endswith("3 examples in 2 rows, 79% full")


def test_every_example_is_in_one_row() -> None:
    sizes = [(7 * n * n + 3) % 60 + 1 for n in range(500)]
    rows = best_fit(sizes, 64)
    assert sorted(n for row in rows for n in row) == list(range(500))
    assert all(sum(sizes[n] for n in row) <= 64 for row in rows)
    least = max(sum(sizes) / 64, sum(size > 32 for size in sizes))
    assert len(rows) <= 11 / 9 * least + 1


def test_what_is_too_long_is_cut_or_left_out_and_told(tmp_path: Path, letters: Path) -> None:
    rows = [{"prompt": "ab", "completion": "cdefgh"}, {"prompt": "abcdefgh", "completion": "i"},
            {"prompt": "a", "completion": "b"}]  # fmt: skip
    path = lines(tmp_path / "a.jsonl", *rows)
    source = opened(path, letters, sequence=4)
    assert [shown(source, targets) for _, targets in source.train] == ["·cde", "b$··"]
    assert source.description.endswith(
        "2 examples in 2 rows, 75% full, 1 cut to 5 tokens, 1 left out, with no answer within these"
    )
    with pytest.raises(ConfigError) as caught:
        opened(lines(tmp_path / "b.jsonl", rows[1]), letters, sequence=4)
    assert str(caught.value) == (
        "data.sequence = 4: no example of the train part has an answer within its first 5 tokens; "
        "try: data.sequence=9"
    )


def test_held_out_examples_and_a_second_source(tmp_path: Path) -> None:
    rows = [{"prompt": f"say {n}: ", "completion": f"{n * n}"} for n in range(100)]
    path = lines(tmp_path / "a.jsonl", *rows, *rows)
    source = opened(path, validation="0.1")
    train, held = texts(source, source.train), texts(source, source.validation)
    assert sorted(train + held) == sorted(2 * [r["prompt"] + r["completion"] for r in rows])
    assert not set(train) & set(held)
    assert 4 <= len(held) <= 40
    other = lines(tmp_path / "b.jsonl", {"messages": [HI, YO]})
    source = opened(path, validation=other)
    assert len(texts(source, source.train)) == 200
    assert texts(source, source.validation) == ["user: hi\nassistant: hm/yo"]


def texts(source: Any, rows: Any) -> list[str]:
    whole = [source.tokenizer.decode(inputs.tolist(), False) for inputs, _ in rows]
    return [text.split("<|endoftext|>")[0] for text in whole]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"message": []}, "has no messages; nearest key: message"),
        ({"prompt": "a"}, "has no messages; the lines before have them"),
        ({"messages": "hi"}, "messages is a list of {role, content}"),
        ({"messages": [{"role": "user"}]}, "message 1: has no content; it has role"),
        ({"messages": [{"role": "user", "content": None}]},
         "message 1: content is NoneType, a text is wanted"),
        ({"messages": [{"role": "asistant", "content": "a"}]}, "message 1: role = asistant: not "
         "one of system, user, assistant, tool, developer; try: assistant"),
        ({"messages": [HI]}, "no message is of role assistant, so there is nothing to learn"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_told_by_its_number(tmp_path: Path, row: Any, text: str) -> None:
    path = lines(tmp_path / "a.jsonl", {"messages": [HI, YO]}, row)
    with pytest.raises(ConfigError) as caught:
        opened(path)
    assert str(caught.value) == f"{tmp_path}/a.jsonl:2: {text}"


def test_a_pair_lacks_a_key(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"}, {"prompt": "a"})
    with pytest.raises(ConfigError, match=r"a.jsonl:2: has no completion; it has prompt$"):
        opened(path)


def test_packing_needs_examples(tmp_path: Path) -> None:
    wanted = (
        "data.packing = on: packs the examples of jsonl:, parquet: or hf: rows with messages, or "
        "with prompt and completion; data.source = {} has none; try: data.packing=off"
    )
    with pytest.raises(ConfigError) as caught:
        check_data(DataSection(packing="on"))
    assert str(caught.value) == wanted.format("stdlib")
    path = lines(tmp_path / "a.jsonl", {"text": "a"})
    with pytest.raises(ConfigError) as caught:
        opened(path, packing="on")
    assert str(caught.value) == wanted.format(path)
    with pytest.raises(ConfigError, match=r"packing = yes: not one of off, on"):
        load_config(None, ["data.packing=yes"])


def test_a_second_source_without_answers(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"})
    other = lines(tmp_path / "b.jsonl", {"text": "b"})
    with pytest.raises(ConfigError) as caught:
        opened(path, validation=other)
    assert str(caught.value) == (
        f"data.validation = {other}: has no answers, on which data.source = {path} is trained; "
        f"try: rows like those, or a share such as data.validation=0.05"
    )


def test_packed_rows_call_the_model_by_name() -> None:
    loaded = load_config(None, ["data.packing=on", "data.source=jsonl:a.jsonl"])
    assert loaded.config.model.call == "kwargs"
    assert loaded.origins["model.call"] == "of data.packing"


def test_a_loop_of_ones_own_opens_the_same(tmp_path: Path) -> None:
    """By `open_data`; a word that means nothing is one line, as is one of the loader's."""
    source = lines(
        tmp_path / "a.jsonl", *({"prompt": f"{n} ", "completion": "x"} for n in range(40))
    )
    keys: dict[str, Any] = {"tokenizer": "bpe:300", "sequence": 32, "packing": "on"}
    section = DataSection(source=source, validation="0.2", **keys)
    ours, own = open_source(section, 0), open_data(source, validation=0.2, **keys)
    assert own.description == ours.description
    assert (len(own.train), len(own.validation)) == (len(ours.train), len(ours.validation))
    assert all(str(own.train[n]) == str(ours.train[n]) for n in range(len(own.train)))
    for wrong, line in (
        ({"lenght": 3}, "open_data has no argument lenght; "),
        ({"sequense": 3}, "open_data has no argument sequense; try: sequence"),
        ({"workers": 2}, r"open_data has no argument workers; try: run.loader\(…, workers=…\)"),
        ({"sequence": "long"}, r"open_data: Expected `int`, got `str` - at `\$.sequence`"),
        ({"sequence": 0}, "sequence = 0: at least 1 is wanted; try: sequence=1"),
        ({"packing": "yes"}, "packing = yes: not one of off, on"),
    ):
        with pytest.raises(ConfigError, match=f"^{line}"):
            open_data(source, **wrong)
