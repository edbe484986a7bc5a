"""Answers of the forms on Chinese pages: every error and every drawing is Chinese, word by word."""

# ruff: noqa: RUF001
# The answers have Chinese punctuation.

from __future__ import annotations

import json
import re
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from shoal.teach.browser import author_code, call

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "website"))

import answer_texts  # noqa: E402
import chinese_style  # noqa: E402
import page_values  # noqa: E402
import translated_pages  # noqa: E402

from shoal.teach.drawings.word_translation import HOLE, WordTranslation  # noqa: E402


@cache
def messages() -> str:
    """Return what a Chinese page sends with each request."""
    return json.dumps(translated_pages.browser_messages())


def ask(what: str, **words: Any) -> dict[str, Any]:
    """Return the answer of a form on a Chinese page."""
    answer: dict[str, Any] = json.loads(call(json.dumps({"what": what, **words}), messages()))
    return answer


def program(*lines: str) -> str:
    """Return a program of these lines."""
    return "async def program(m):\n" + "".join(f"    {line}\n" for line in lines)


FORWARD = (
    "m.load(0)", "m.load(1)", "m.input(range(4), 0)", "m.forward(0, 0, 1, 0)",
    "m.forward(1, 1, 2, 1)", "m.loss(2, 'g')",
)  # fmt: skip
"""Of one rank, over both layers of a puzzle."""
ON_FOUR = (
    "m.load(0)", "m.load(1)", "m.input([m.rank], 0)", "m.forward(0, 0, 1, 0)",
    "m.forward(1, 1, 2, 1)", "m.loss(2, 'g')", "m.backward(1, 1, 'g', 'h', 'w', 1)",
)  # fmt: skip
"""Of each of four ranks, up to a gradient of the last layer."""
OWN_ERRORS = [
    ("x = 1\ny = x / 0\n", "你的程序，第 2 行：ZeroDivisionError: division by zero"),
    ("def program(m:\n", "你的程序，第 1 行：SyntaxError: '(' was never closed"),
    (program("m.load(0", ")", "x = y"), "你的程序，第 4 行：NameError: name 'y' is not defined"),
    (program("m.nothing()"),
     "你的程序，第 2 行：AttributeError: 'PuzzleRank' object has no attribute 'nothing'"),
    (program("raise ValueError('steps 1, target 2; line 4: 3 steps')"),
     "你的程序，第 2 行：ValueError: steps 1, target 2; line 4: 3 steps"),
    ("async def program():\n    pass\n",
     "你的程序：TypeError: program() takes 0 positional arguments but 1 was given"),
    ("x = 1",
     "你的程序：没有定义 async def program(m)；可以从 shoal docs puzzles --lang zh 的第一个例子开始"),
]  # fmt: skip
"""Program → answer: what Python itself says stays as it is."""
BROKEN_RULES = [
    (0, ["m.input([9], 0)"], "rank 0：输入 [9]：批次里没有这么多样本"),
    (0, ["m.input([0], 0)", "m.input([0, 1], 1)"], "rank 0：输入 [0, 1] 取了两次"),
    (0, ["m.forward(0, 0, 1, 0)"], "rank 0 没有 activations[0]"),
    (0, ["m.load(0)"], "程序结束时，第 0 层缺少第 1 步更新后的完整权重"),
    (0, ["m.load(0)", "m.input([0], 0)", "m.forward(0, 0, 1, 0)", "m.load(1)"],
     "rank 0：第 1 层的权重在开始之后才加载"),
    (0, ["m.load(0, total=2)", "m.input([0], 0)", "m.forward(0, 0, 1, 0)"],
     "rank 0：第 0 层的前向没有完整的权重"),
    (0, ["m.load(1)", "m.input([0], 0)", "m.forward(1, 0, 2, 1)"],
     "rank 0：第 1 层的前向收到的是第 0 层的输入"),
    (0, ["m.input([0], 0)", "m.loss(0, 1)"], "rank 0：损失读的是第 0 层，不是最后一层"),
    (0, [*FORWARD, "m.backward(0, 0, 'g', 'h', 'w', 0)"],
     "rank 0：第 0 层的反向收到的是第 0 层和第 1 层的数据"),
    (0, [*FORWARD, "m.backward(1, 1, 'g', 'h', 'w', 1)", "m.backward(0, 0, 'h', 'k', 'v', 0)",
         "m.backward(0, 0, 'k', 'k', 'v', 0)"],
     "rank 0：第 0 层的反向收到的是第 0 层和第 -1 层的数据"),
    (0, ["m.load(1, 'part', 0, 2)", *FORWARD, "m.backward(1, 1, 'g', 'h', 'w', 'part')"],
     "rank 0：第 1 层的反向没有完整的权重"),
    (0, ["m.load(0)", "m.load(1)", "m.input([0], 0)", "m.input([1], 5)", "m.forward(0, 0, 1, 0)",
         "m.forward(1, 1, 2, 1)", "m.loss(2, 'g')", "m.forward(0, 5, 6, 0)",
         "m.backward(1, 6, 'g', 'h', 'w', 1)"],
     "rank 0：第 1 层的反向：输入和梯度来自不同的样本"),
    (0, ["m.empty(0, 'a')", "m.empty(1, 'b')", "m.add('a', 'b')"],
     "rank 0：梯度 a 和 b 不属于同一个分片"),
    (0, ["m.load(0)", "m.load(1)", "m.rename('weights', 1, 0)"], "rank 0：weights[0] 已经存在"),
    (0, ["m.load(0)", "m.empty(1, 'a')", "m.update(0, 'a', 0)"],
     "rank 0：第 0 层的更新收到的梯度属于第 1 层，权重属于第 0 层"),
    (0, ["m.load(0)", "m.empty(0, 'a')", "m.update(0, 'a', 0)"],
     "rank 0：第 0 层的更新缺少样本 [0, 1, 2, 3] 的梯度"),
    (0, [*FORWARD, "m.backward(1, 1, 'g', 'h', 'w', 1)", "m.update(1, 'w', 1, 'n')",
         "m.rename('weights', 1, 'old')", "m.rename('weights', 'n', 1)", "m.update(1, 'w', 1)"],
     "rank 0：第 1 层的更新：权重在第 1 步，优化器状态在第 0 步"),
    (2, [*ON_FOUR, "await m.reduce_scatter('w')", "m.update(1, 'w', 1)"],
     "rank 0：第 1 层的更新：分片不一致"),
    (2, [*ON_FOUR, "await m.reduce_scatter('w')", "await m.reduce_scatter('w')"],
     "rank 0：对一个分片做 reduce-scatter"),
    (2, ["m.load(0)", "m.empty(0, 0)", "m.empty(1, 1)",
         "if m.rank == 0: await m.all_gather(0, 5)", "elif m.rank == 1: await m.all_reduce(0)",
         "else: await m.reduce_scatter(1)"],
     "各 rank 进入了不同的集合通信：all-gather（第 0 层），all-reduce（第 0 层），"
     "reduce-scatter（第 1 层）"),
    (2, ["m.load(0)", "if m.rank == 0: await m.send(2, 'weights', 0)",
         "if m.rank == 2: await m.receive(1, 9)"],
     "rank 2 在等 rank 1 的消息，但自己信箱里的消息来自 rank 0"),
    (2, ["m.empty(0, 0)", "if m.rank: await m.all_reduce(0)", "await m.receive(1, 1)"],
     "死锁：rank 0 在 receive 中等待 rank 1；rank 1 在 all-reduce 中等待；"
     "rank 2 在 all-reduce 中等待；rank 3 在 all-reduce 中等待"),
]  # fmt: skip
"""(puzzle, lines of a program, answer)."""
FORMS = [
    ({"what": "pipeline", "name": "dualpipe", "ranks": 3, "micro_batches": 8},
     "layout.schedule = dualpipe：rank 数和微批次数都必须是偶数，每个 rank 至少两个微批次，"
     "这里 layout.pp = 3，微批次数为 8；可以试试 layout.pp=4、微批次数 8"),
    ({"what": "pipeline", "name": "interleaved", "ranks": 4, "micro_batches": 7},
     "layout.schedule = interleaved：每步的微批次数必须是 layout.pp = 4 的倍数，这里是 7；"
     "可以试试微批次数 8，或者 layout.schedule=1f1b"),
    ({"what": "pipeline", "name": "1f1b", "ranks": 0, "micro_batches": 8},
     "layout.schedule = 1f1b：至少需要 1 个 rank、1 个微批次、1 段，这里分别是 0、8、1"),
    ({"what": "pipeline", "name": "gpipe", "ranks": 1000, "micro_batches": 64},
     "--ranks × --micro-batches = 1000 × 64：太多，画不下；可以试试 --micro-batches 10"),
    ({"what": "walk", "name": "tp", "ranks": 1},
     "--ranks = 1：“张量并行”只能画 2 到 16 个 rank；可以试试 --ranks 2"),
    ({"what": "walk", "name": "ddp", "ranks": -1},
     "--ranks = -1：“DDP”只能画 2 到 16 个 rank；可以试试 --ranks 2"),
    ({"what": "walk", "name": "cp", "ranks": 0},
     "--ranks = 0：“环形注意力”只能画 2 到 16 个 rank；可以试试 --ranks 2"),
    ({"what": "walk", "name": "ep", "ranks": 16},
     "--ranks = 16：“专家并行”只能画 2 到 8 个 rank；可以试试 --ranks 8"),
    ({"what": "walk", "name": "local-steps", "ranks": 17},
     "--ranks = 17：DiLoCo 只能画 2 到 16 个孤岛；可以试试 --ranks 16"),
    ({"what": "plan", "model": "llama-3-8b", "machines": "8xH100-80GB", "samples": -1},
     "train.batch = -1：必须大于 0；可以试试 train.batch=1"),
]  # fmt: skip
"""Requests that a drawing or the planner refuses."""
CLUSTERS = [
    ("8xH99", "--on “8xH99”：设备目录里没有“H99”，只有 "),
    ("8xmygpu", "--on “8xmygpu”：设备目录里没有“mygpu”，只有 "),
    ("", "--on “”：还没有读到内容，接下来应当是设备名，例如“H100-80GB”，或者“cpu”，这里却是末尾；例如 --on "),
    ("8x", "--on “8x”："),
    ("0xH100", "--on “0xH100”：已经读到“0x”（第 2 个字符），接下来应当是前面的个数，至少为 1，这里却是"),
    ("8xH100-80GB,", "接下来应当是“+”、“,key=value”或末尾，这里却是"),
    ("4x(8xH100-80GB", "接下来应当是“)”或“+”，这里却是末尾；例如 --on "),
    ("4x(8xH100-80GB)", "接下来应当是孤岛之间的速率，例如“@200Mbit”或“@10Gbit”，这里却是末尾；例如 --on "),
    ("4x(8xH100-80GB)@200Mbit + 8xH100-80GB", "：各孤岛必须相同，所以“+”要写在括号里；可以试试 --on "),
    ("4x(2x(8xH100-80GB)@1Gbit)@200Mbit", "：孤岛里不能再有孤岛；例如 "),
    ("8xH100-80GB,rate=4", "：机器没有 rate= 这个选项，只有 inside、ib、roce、eth；例如 --on "),
    ("4x(8xH100-80GB)@200Mbit,rate=4", "：孤岛之间的链路没有 rate= 这个选项；可以试试 latency=50ms"),
    ("4x(8xH100-80GB)@200Mbit,latency=4", "：latency=4 不是时间；可以试试 latency=50ms"),
    ("8xH100-80GB,ib=fast", "：ib=fast 不是每个节点的网卡数和每秒的比特数；可以试试 ib=8x400Gb"),
    ("20xH100-80GB", "：20 块 H100-80GB 凑不成每个 8 块的完整节点；可以试试 3x8xH100-80GB，单个节点则用 1x20xH100-80GB"),
    ("8xmine.toml", "--on mine.toml：无法读取（没有这个文件）；设备参数文件里有 "),
    ("8xH100-80GB,inside=pcie9", "--on …,inside = pcie9：只能是 "),
]  # fmt: skip
"""Machines that the planner refuses → part of its answer."""
TERMS = {
    "all", "reduce", "scatter", "gather", "rank", "token", "query", "key", "value",
    "gpipe", "interleaved", "zero", "zbv", "dualpipe", "dx", "dy", "kv", "ms", "min",
}  # fmt: skip
"""Words of the field that a Chinese engineer uses in English, and names: schedules, tensors, units."""


ENGLISH = re.compile(r"(?<![-\w])[a-z]+ [a-z]+")
"""Two English words in a row."""
CODE = re.compile(r"[A-Za-z_]\w*(?:[.=\[(/][\w=()\[\]/]+)+|“[^”]*”|--[a-z-]+", re.ASCII)
"""Settings, calls, quoted names and options."""


def english_words(text: str) -> list[str]:
    """Return the English words of an answer that are no term, setting, name or code.

    >>> english_words("每个 rank 的 work：layout.pp=3，m.load(0)，DDP")
    ['work']
    """
    bare = CODE.sub(" ", text)
    return [word for word in re.findall(r"(?<![\w-])[a-z][a-z']+", bare) if word not in TERMS]


@pytest.mark.parametrize(("code", "wanted"), OWN_ERRORS)
def test_an_error_of_the_own_code_has_its_line_and_stays_as_python_says_it(
    code: str, wanted: str
) -> None:
    assert ask("puzzle", number=0, code=code)["error"] == wanted


@pytest.mark.parametrize(("number", "lines", "wanted"), BROKEN_RULES)
def test_a_broken_rule_is_named_in_chinese(number: int, lines: list[str], wanted: str) -> None:
    assert ask("puzzle", number=number, code=program(*lines))["error"] == f"谜题：{wanted}"


@pytest.mark.parametrize(("request_", "wanted"), FORMS)
def test_numbers_that_cannot_be_drawn_are_refused_in_chinese(
    request_: dict[str, Any], wanted: str
) -> None:
    assert ask(**request_)["error"] == wanted


@pytest.mark.parametrize(("machines", "wanted"), CLUSTERS)
def test_machines_that_cannot_be_parsed_are_refused_in_chinese(machines: str, wanted: str) -> None:
    error = ask("plan", model="llama-3-8b", machines=machines, samples=512)["error"]
    assert wanted in error
    assert ENGLISH.findall(error) == []


@pytest.mark.parametrize(
    ("model", "machines", "samples"),
    [("gpt-3-1.3b", "8xA100-80GB", 7), ("llama-3-70b", "8xRTX4090-24GB", 64),],
)  # fmt: skip
def test_a_plan_is_chinese(model: str, machines: str, samples: int) -> None:
    lines = ask("plan", model=model, machines=machines, samples=samples)["lines"]
    assert [line for line in lines if ENGLISH.search(line)] == []
    assert lines[0].startswith("1. ")


def test_a_score_over_the_target_has_its_unit() -> None:
    code = re.sub(r"\s+m\.free\(\"activations\", .*\)", "", author_code(0)["code"])
    lines = ask("puzzle", number=0, code=code)["lines"]
    assert re.fullmatch(r"超过目标：保存的数有 [\d,]{9} 个，目标 2,600,000 个。", lines[-1])


def shown(answer: dict[str, Any]) -> list[str]:
    """Return every text of an answer: its lines, and those of its drawing."""
    return [*answer["lines"], *translated_pages.svg_texts(answer["svg"])]


DRAWINGS = [
    *({"what": "walk", "name": name, "ranks": ranks}
      for name, ranks in product(translated_pages.DRAWN, (2, 3, 5, 8, 9, 16))
      if (name, ranks) not in (("ep", 9), ("ep", 16)) and name != "zero"),
    *({"what": "pipeline", "name": name, "ranks": ranks, "micro_batches": micro}
      for name, (ranks, micro) in product(
          translated_pages.SCHEDULES, [*translated_pages.COUNTS, (2, 1), (4, 3), (10, 20)])
      if (name, micro % ranks) in ((name, 0), (name, micro)) or name != "interleaved"),
    *({"what": "puzzle", "number": number} for number in range(8)),
]  # fmt: skip
"""Requests that forms can send, and that draw something; some schedules refuse few micro-batches."""


@pytest.mark.parametrize("request_", DRAWINGS, ids=lambda one: "-".join(map(str, one.values())))
def test_every_word_of_a_drawing_in_a_page_is_chinese(request_: dict[str, Any]) -> None:
    more = {"code": author_code(request_["number"])["code"]} if "number" in request_ else {}
    answer = ask(**request_, **more)
    texts = [answer["error"]] if "error" in answer else shown(answer)
    assert {text: words for text in texts if (words := english_words(text))} == {}
    assert [text for text in texts if chinese_style.HALF.search(text)] == []


@pytest.mark.parametrize("pattern", [one for one in answer_texts.ANSWERS if HOLE.search(one)])
def test_a_message_is_taken_by_its_own_pattern(pattern: str) -> None:
    """An earlier pattern that fits the whole line as well would take it: "{}: line {}" did."""
    words = WordTranslation(translated_pages.browser_messages())
    fills = {"{}": "alpha", "{=}": "beta", "#": "3"}
    english, chinese = (
        HOLE.sub(lambda hole: fills[hole[0]], text) for text in (pattern, words.messages[pattern])
    )
    assert words.text(english) == chinese


def test_translations_have_the_holes_of_their_messages() -> None:
    for english, chinese in translated_pages.translations("answers").items():
        assert sorted(HOLE.findall(english)) == sorted(HOLE.findall(chinese)), english


def test_the_title_over_a_figure_is_chinese() -> None:
    words = translated_pages.translations("widgets")
    titles = [page_values.source_title(one, words) for one in ("= 6 * 2", "shoal simulate ddp#a")]
    assert titles == ["计算：6 * 2", "来源：shoal simulate ddp#a"]
    english = [page_values.source_title(one, {}) for one in ("= 6 * 2", "shoal simulate ddp#a")]
    assert english == ["computed: 6 * 2", "from shoal simulate ddp#a"]
