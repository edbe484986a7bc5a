"""A run compares the tokenizer of its data with its model: refusals, a notice, no false alarm."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import nn

import shoal
from shoal.data.sources import open_data
from shoal.data.text.encodings import Encoding
from shoal.data.text.text_files import train_bpe_on
from shoal.trainer.guards.tokenizer_match import describe_vocabulary, refuse_missing_rows

TEXT = "the cat sat on a mat and ate fish while birds sang songs of summer\n" * 60


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class TinyText(nn.Module):
    """A model of one's own, with a table of positions beside that of tokens."""

    def __init__(self, rows: int, *, plain: bool = False) -> None:
        super().__init__()
        self.positions = nn.Embedding(16, 4)
        if plain:
            self.table = nn.Parameter(torch.randn(rows, 4))
        else:
            self.tokens = nn.Embedding(rows, 4)
        self.head = nn.Linear(4, rows)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, seq, rows]."""
        table = self.table if hasattr(self, "table") else self.tokens.weight
        return self.head(table[ids] + self.positions.weight[: ids.shape[1]])


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A source of a small text, cut by a new bpe of at most 300 ids."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text(TEXT)
    return open_data("text:a.txt", tokenizer="bpe:300", sequence=8, validation=0)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "read other words" in one.getMessage()]


def start(model: nn.Module, text: Any, **more: Any) -> None:
    """Open a loader over the text in a loop of one's own."""
    run = shoal.parallelize(model, sgd, batch=4, **more)
    try:
        run.loader(text.train)
    finally:
        run.close()


def test_ids_without_a_row_are_refused_before_the_first_step(text: Any) -> None:
    most = text.vocabulary - 1
    with pytest.raises(shoal.ConfigError) as caught:
        start(TinyText(200), text)
    assert str(caught.value) == (
        f"model: no weight has more than 200 rows, and data.tokenizer = bpe:300 of text:a.txt has "
        f"token ids up to {most}; try: a model with a vocabulary of {most + 1}"
    )
    data = torch.utils.data.DataLoader(text.train, batch_size=4)
    run = shoal.parallelize(TinyText(200), sgd, batch=4)
    with pytest.raises(shoal.ConfigError, match="no weight has more than 200 rows"):
        next(iter(run.steps(data)))
    run.close()


@pytest.mark.parametrize("model", [TinyText(300), TinyText(512), TinyText(300, plain=True)])
def test_models_with_enough_rows_pass(
    model: nn.Module, text: Any, caplog: pytest.LogCaptureFixture
) -> None:
    start(model, text)
    assert lines(caplog) == []


def test_guards_off_checks_nothing(text: Any) -> None:
    start(TinyText(200), text, guards="off")


def test_a_tokenizer_of_parallelize_is_compared_too() -> None:
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(50)}, unk_token="w0"))
    with pytest.raises(shoal.ConfigError) as caught:
        shoal.parallelize(TinyText(40), sgd, batch=4, tokenizer=words)
    assert str(caught.value) == (
        "model: no weight has more than 40 rows, and the tokenizer of parallelize(tokenizer=…) "
        "has token ids up to 49; try: a model with a vocabulary of 50"
    )


def test_added_tokens_need_no_row() -> None:
    """Many tokenizers hold added tokens beyond the rows of their model."""
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(40)}, unk_token="w0"))
    words.add_special_tokens(["<pad>"])
    known = describe_vocabulary(TinyText(40))
    refuse_missing_rows(Encoding("text:a", "t.json", words.get_vocab_size(), words), known)
    with pytest.raises(shoal.ConfigError):
        refuse_missing_rows(
            Encoding("text:a", "t.json", 0, words), describe_vocabulary(TinyText(39))
        )


class Config:
    """What a model of transformers knows of its origin."""

    def __init__(self, folder: Path) -> None:
        self._name_or_path = str(folder)


class Pretrained(TinyText):
    """A model with the interface of transformers; `rows` is also the size of its vocabulary."""

    def __init__(self, folder: Path, rows: int = 320) -> None:
        super().__init__(rows)
        self.config = Config(folder)

    def get_input_embeddings(self) -> nn.Module:
        """Return the table of tokens."""
        return self.tokens


class Wrapped(nn.Module):
    """A user's module around another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        logits: torch.Tensor = self.inner(ids)
        return logits


@pytest.fixture
def pretrained(tmp_path: Path) -> Pretrained:
    """A model whose weights lie in a folder, with a tokenizer.json of its own."""
    folder = tmp_path / "weights"
    folder.mkdir()
    model = Pretrained(folder)
    save_file({"model.tokens.weight": model.tokens.weight.detach()}, folder / "model.safetensors")
    texts = ["ships on the sea and the song of a bird " * 40]
    train_bpe_on(texts, 300).save(str(folder / "tokenizer.json"))
    return model


def check_notice(model: nn.Module, folder: Path, text: Any, lines: list[str]) -> None:
    """The one line on weights that read other words."""
    (line,) = lines
    token = ast.literal_eval(line.partition(" know ")[2].partition(" as token ")[0])
    here = text.tokenizer.token_to_id(token)
    there = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(token)
    assert here != there
    assert line == (
        f"shoal: model: the weights of {folder} know {token!r} as token {there}, and "
        f"tokenizer = bpe:300 of text:a.txt cuts it as token {here}, so they read other "
        f"words; try: open_data(…, tokenizer='{folder}/tokenizer.json'), or "
        f'tokenizer="{folder}/tokenizer.json"'
    )


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapped])
def test_weights_that_read_other_words_are_named_once(
    pretrained: Pretrained, text: Any, caplog: pytest.LogCaptureFixture, wrap: Any
) -> None:
    """In an own loop, with a new bpe; also inside a module of the user's."""
    run = shoal.parallelize(wrap(pretrained), sgd, batch=4)
    run.loader(text.train)
    run.loader(text.train, workers=1)
    run.close()
    check_notice(pretrained, Path("weights").absolute(), text, lines(caplog))


def test_no_alarm_for_its_own_tokenizer_or_fresh_weights(
    pretrained: Pretrained, text: Any, caplog: pytest.LogCaptureFixture
) -> None:
    own = open_data("text:a.txt", tokenizer="weights/tokenizer.json", sequence=8, validation=0)
    start(pretrained, own)
    start(Pretrained(Path("weights")), text)  # built from the configuration alone
    assert lines(caplog) == []


@pytest.mark.proof
def test_models_of_transformers(
    tmp_path: Path, text: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """from_pretrained gets the notice; a model of the same configuration does not."""
    hf = pytest.importorskip("transformers")
    folder = tmp_path / "llama"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "vocab_size": 320, "max_position_embeddings": 16}
    hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    texts = ["ships on the sea and the song of a bird " * 40]
    train_bpe_on(texts, 300).save(str(folder / "tokenizer.json"))
    fresh = hf.LlamaForCausalLM(hf.AutoConfig.from_pretrained(folder))
    assert fresh.config._name_or_path == str(folder)
    start(fresh, text)
    assert lines(caplog) == []
    for tied in (False, True):
        caplog.clear()
        model = hf.LlamaForCausalLM.from_pretrained(folder, tie_word_embeddings=tied)
        start(model, text)
        check_notice(model, folder, text, lines(caplog))
    model.resize_token_embeddings(100)
    with pytest.raises(shoal.ConfigError, match=r"model.embed_tokens has 100 rows"):
        start(model, text)


def test_a_table_that_a_model_names_is_the_one_that_counts(
    pretrained: Pretrained, text: Any
) -> None:
    pretrained.tokens = nn.Embedding(100, 4)
    with pytest.raises(shoal.ConfigError) as caught:
        start(pretrained, text)
    most = text.vocabulary - 1
    folder = Path("weights").absolute()
    assert str(caught.value) == (
        f"model: tokens has 100 rows, and data.tokenizer = bpe:300 of text:a.txt has token ids up "
        f"to {most}; try: tokenizer={folder}/tokenizer.json, or a model with a vocabulary of "
        f"{most + 1}"
    )
