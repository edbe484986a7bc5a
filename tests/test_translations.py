"""The Chinese pages: none falls behind its English page, and all of a page is Chinese."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from shoal.cli.main import app
from shoal.teach.browser import call

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "website"))

import catalogs  # noqa: E402
import chinese_style  # noqa: E402
import page_messages  # noqa: E402
import page_values  # noqa: E402
import translated_pages  # noqa: E402

PAGES = sorted(translated_pages.PAGES)
WRITTEN = sorted(target for _, target in translated_pages.PAGES.values())


def test_every_message_has_a_current_translation() -> None:
    """Red if an English page, a drawing, an exercise or a widget changed: `… update`, translate."""
    assert translated_pages.find_old_messages() == []


def test_the_pages_are_those_of_their_catalogs() -> None:
    """`python website/translated_pages.py write` makes them."""
    old = [str(path.relative_to(ROOT)) for path, text in translated_pages.written_files()
           if path.read_text(encoding="utf-8") != text]  # fmt: skip
    assert old == []
    kept = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "zh").rglob("*.md")}
    assert kept == {*WRITTEN} - {"README.zh-CN.md"}


def test_the_drawings_are_those_of_the_english_pages() -> None:
    """Drawn without words of another language, they are the committed ones."""
    words = translated_pages.WordTranslation({})
    for stem in sorted(translated_pages.drawings_by_stem()):
        committed = ROOT / "docs" / "drawings" / f"{stem.replace('_', '-')}.svg"
        assert translated_pages.draw(stem, words) == committed.read_text(encoding="utf-8")


TEXT = re.compile(r'<text class="\w+" x="([\d.]+)" y="[\d.]+" font-size="(\d+)">([^<]*)</text>')


def test_no_line_of_a_drawing_is_wider_than_it() -> None:
    """A Chinese letter takes one em, a latin one half of it: lines are broken by that."""
    lines = 0
    for path in sorted((ROOT / "docs" / "zh" / "drawings").glob("*.svg")):
        drawn = path.read_text(encoding="utf-8")
        width = float(drawn.partition('width="')[2].partition('"')[0])
        for x, size, text in TEXT.findall(drawn):
            wide = len(re.findall(r"[\u3000-\u9fff\uff00-\uff60]", text))
            right = float(x) + float(size) * (wide + 0.5 * (len(text) - wide))
            assert right <= width, (path.name, text)
            lines += wide > 40
    assert lines >= 10


def test_a_tooltip_has_its_start_and_its_end() -> None:
    """English "of stage 0, 0 to 1 s" has two figures in a row, which a message takes for one."""
    found = 0
    for path in sorted((ROOT / "docs" / "zh" / "drawings").glob("*.svg")):
        for words in re.findall(r"<title>([^<]+)</title>", path.read_text(encoding="utf-8")):
            assert re.search(r"[^\s,]\uff0c从 [\d.]+ 到 [\d.]+ (ms|s)\b", words), (path.name, words)
            found += 1
    assert found >= 170


def test_punctuation_of_drawings_is_full_width() -> None:
    """Titles of two timelines in one label had a half-width semicolon, a formula a parenthesis."""
    texts = 0
    for path in sorted((ROOT / "docs" / "zh" / "drawings").glob("*.svg")):
        for text in translated_pages.svg_texts(path.read_text(encoding="utf-8")):
            assert not chinese_style.HALF.search(text), (path.name, text)
            texts += 1
    assert texts >= 800


def test_a_changed_message_is_found(tmp_path: Path) -> None:
    """A sentence, a heading and a cell of an English page: each makes its catalog old."""
    page = tmp_path / "ranks.md"
    shutil.copy(ROOT / "docs" / "learn" / "ranks.md", page)
    before = page_messages.split_page(page.read_text(encoding="utf-8"))
    known = translated_pages.translations("learn/ranks")
    for old, new in (
        ("A launcher starts the same script many times.", "A launcher starts each script once."),
        ("## The pitfall", "## Two pitfalls"),
        ("| this node |", "| the rank of this node |"),
    ):
        text = page.read_text(encoding="utf-8").replace(old, new)
        parts = page_messages.split_page(text)
        lost = [one.text for one in parts if not isinstance(one, str) and one.text not in known]
        assert len(lost) == 1, (new, lost)
        entries = catalogs.merge_messages(
            dict.fromkeys(lost, "ranks.md:1"),
            {source: catalogs.CatalogEntry(source, zh) for source, zh in known.items()},
        )
        assert not entries[0].is_current
    assert "".join(part if isinstance(part, str) else part.fill(part.text) for part in before)


def test_a_new_figure_leaves_a_translation_current() -> None:
    one = page_messages.make_message("takes {value}`3 s <a#b>`", 1)
    other = page_messages.make_message("takes {value}`4 s <a#b>`", 1)
    assert one.text == other.text
    assert other.fill("需要 {1}") == "需要 {value}`4 s <a#b>`"


def test_a_catalog_is_read_as_it_was_written(tmp_path: Path) -> None:
    entries = [
        catalogs.CatalogEntry('say "a"\\n', '说“a”"', "x.md:3"),
        catalogs.CatalogEntry("    one\n    two", "    一\n    二", "x.md:5"),
        catalogs.CatalogEntry("new words", "旧译", "x.md:9", "old words"),
        catalogs.CatalogEntry("none yet"),
    ]
    catalogs.write_catalog(tmp_path / "x.po", entries, "zh_CN")
    assert list(catalogs.read_catalog(tmp_path / "x.po").values()) == entries
    assert [one.is_current for one in entries] == [True, True, False, False]
    if shutil.which("msgfmt"):
        done = subprocess.run(
            ["msgfmt", "--check-format", "-o", str(tmp_path / "x.mo"), str(tmp_path / "x.po")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def without_comments(block: str) -> list[str]:
    """Return the lines of a block; a program's comments are translated, the rest is not."""
    if block.startswith(page_messages.CONSOLE):
        return block.splitlines()
    lines = block.splitlines(keepends=True)
    found = [page_messages.COMMENT.fullmatch(line) for line in lines]
    return [one[1] if one else line.strip("\n") for one, line in zip(found, lines, strict=True)]


@pytest.mark.parametrize("name", PAGES)
def test_figures_code_and_links_are_kept(name: str) -> None:
    english, chinese = (ROOT / path for path in translated_pages.PAGES[name])
    here, there = english.read_text(encoding="utf-8"), chinese.read_text(encoding="utf-8")
    sources = [re.findall(r"\{value\}`[^`<]+<([^`]+)>`", text) for text in (here, there)]
    assert sorted(sources[0]) == sorted(sources[1])
    blocks = [re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL) for text in (here, there)]
    assert [without_comments(one) for one in blocks[0]] == [
        without_comments(one) for one in blocks[1]
    ]
    for source, zh in translated_pages.translations(name).items():
        places = [sorted(re.findall(r"\{(\d+)", text)) for text in (source, zh)]
        assert places[0] == places[1], source
        codes = [set(re.findall(r"`[^`]+`", text)) for text in (source, zh)]
        assert codes[0] <= codes[1], source
        targets = [sorted(re.findall(r"\]\(([^)]+)\)", text)) for text in (source, zh)]
        assert targets[0] == targets[1], source


@pytest.mark.parametrize("name", ["failures", "sharding"])
def test_figures_with_chinese_units_are_those_of_their_sources(name: str) -> None:
    """The pages that change a figure's unit; `make docs` compares the others."""
    text = (ROOT / "docs" / "zh" / "learn" / f"{name}.md").read_text(encoding="utf-8")
    bare = page_values.FENCE.sub("", text)
    assert list(page_values.page_problems(bare)) == []
    (wrong,) = page_values.page_problems("{value}`3.2 小时 <= 54 * 24 * 3600 / 419>`")
    assert "3.2" in wrong[1]


@pytest.mark.parametrize("page", WRITTEN)
def test_style_of_chinese_pages(page: str) -> None:
    assert chinese_style.find_problems((ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("这里有一个进程,那里也有。", "half-width"),
        ("每个 rank(进程)都有。", "half-width"),
        ("可以写 `ddp`, `fsdp`。", "half-width"),
        ("Every rank holds the whole model and its gradients.", "English"),
        ("```python\nx = 1  # every rank sends its own part\n```", "line 4: English"),
        ("这是一句。 Then every rank sends its own part to the next one.", "English"),
    ],
)
def test_a_fault_of_style_is_found(text: str, problem: str) -> None:
    found, *_ = chinese_style.find_problems(f"# 标题\n\n{text}\n")
    assert problem in found


def test_terms_are_those_of_the_glossary() -> None:
    """A term of the glossary in English is its Chinese word, or stays as it is, in every message."""
    terms = chinese_style.read_glossary()
    assert len(terms) >= 45
    assert terms["gradient accumulation"] == ("梯度累积",)
    problems = []
    for name in PAGES:
        for source, zh in translated_pages.translations(name).items():
            problems += [f"{name}: {term}: {zh}" for term in chinese_style.lost_terms(source, zh)]
    assert problems == []
    assert chinese_style.lost_terms("Gradient accumulation is exact.", "梯度累加是精确的。")


def shown_text(text: str) -> str:
    """Return a page as Markdown shows it, without code."""
    bare = re.sub(r"\{value\}`[^`]+`", "1", text)
    html = MarkdownIt().render(bare)
    return re.sub(r"<pre>.*?</pre>|<code>.*?</code>", "", html, flags=re.DOTALL)


@pytest.mark.parametrize("page", WRITTEN)
def test_no_mark_of_emphasis_is_left(page: str) -> None:
    """Between Chinese letters Markdown closes `**` only where no punctuation stands before it."""
    assert "**" in shown_text("**死锁。**下一句话。")
    assert "**" not in shown_text((ROOT / page).read_text(encoding="utf-8"))


# Words in the browser.


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on this machine")
def test_scripts_translate_as_python_does() -> None:
    words = translated_pages.WordTranslation(translated_pages.browser_messages())
    texts = [
        "64 devices: 15.4 times as fast, 24.1 % efficient.",
        "Compute 62.5 ms, all-reduce 181 ms, step 243 ms.",
        "Rank 0 holds 8 micro-batches under GPipe, 4 under 1F1B.",
        "Mean of the two means: 3.5; 40 % off.", "until 42.0 ms", "no such words 3",
    ]  # fmt: skip
    script = f"""
    globalThis.shoalMessages = {json.dumps(words.messages)};
    const words = require({json.dumps(str(ROOT / "website" / "static" / "words.js"))});
    console.log(JSON.stringify({json.dumps(texts)}.map(words.text)));
    """
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    got = json.loads(done.stdout)
    assert got == [words.text(text) for text in texts]
    assert "3.5" in got[3]
    assert "偏差 40 %" in got[3]
    assert got[5] == texts[5]


def test_a_drawing_in_a_page_is_chinese_for_other_numbers_of_ranks() -> None:
    messages = json.dumps(translated_pages.browser_messages())
    for name in ("tp", "ddp"):
        answer = json.loads(call(json.dumps({"what": "walk", "name": name, "ranks": 3}), messages))
        assert "并行" in answer["svg"] or "反向" in answer["svg"]
        shown = [text for text in translated_pages.svg_texts(answer["svg"])
                 if chinese_style.is_english(text)]  # fmt: skip
        assert shown == []


STUCK = """async def program(m):
    m.load(0)
    m.empty(0, 0)
    if m.rank > 0:
        await m.all_reduce(0)
    await m.receive((m.rank + 1) % m.ranks, 1)
"""
TWICE = "async def program(m):\n    m.input([0], 0)\n    m.input([0], 1)\n"
PLAN = {"what": "plan", "model": "gpt-3-1.3b", "machines": "8xA100-80GB", "samples": 7}
PUZZLE = {"what": "puzzle", "number": 2}


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (PLAN, "放得下"), (PLAN | {"machines": "8xmygpu"}, "设备目录里没有"),
        (PUZZLE | {"code": STUCK}, "rank 0 在 receive 中等待 rank 1"),
        (PUZZLE | {"code": TWICE}, "取了两次"), (PUZZLE | {"code": "x = 1"}, "你的程序"),
        (PUZZLE | {"code": json.loads(call('{"what": "author", "number": 2}'))["code"]}, "达到目标"),
        ({"what": "pipeline", "name": "dualpipe", "ranks": 3, "micro_batches": 8}, "必须是偶数"),
        ({"what": "walk", "name": "tp", "ranks": 1}, "只能画 2 到 16 个 rank"),
    ],
)  # fmt: skip
def test_answers_in_a_page_are_chinese(request_: dict[str, Any], words: str) -> None:
    messages = json.dumps(translated_pages.browser_messages())
    answer = json.loads(call(json.dumps(request_), messages))
    shown = [*answer.get("lines", []), answer.get("error", "")]
    shown += translated_pages.svg_texts(answer.get("svg", ""))
    assert words in "".join(shown)
    rest = "".join(shown).replace("async def program", "").replace("shoal docs puzzles", "")
    assert re.findall(r"(?<![\w.=-])[a-z]{3,} [a-z]{2,} [a-z]{2,}", rest) == []
    english = json.loads(call(json.dumps(request_)))
    assert words not in "".join([*english.get("lines", []), english.get("error", "")])


def test_a_message_with_holes_takes_the_words_in_their_turn() -> None:
    words = translated_pages.WordTranslation({"{} of {}": "{}的{}", "one part": "一份"})
    assert words.text("one part of mine") == "一份的mine"
    assert words.text("no such thing") == "no such thing"


def test_exercises_are_checked_in_chinese() -> None:
    words = translated_pages.exercise_words("failures")
    record: dict[str, Any] = {"name": "a", "answer": 43.8, "text": "43.8 h", "choices": [],
                              "mistakes": [[5.0, "that is years of one GPU"]]}  # fmt: skip
    got = translated_pages.translate_values(record, words)
    assert (got["text"], got["mistakes"]) == ("43.8 小时", [[5.0, "那是单块 GPU 的故障间隔的年数"]])


# The command.


def docs(*words: str) -> Any:
    """Run `shoal docs`."""
    return CliRunner().invoke(app, ["docs", *words])


def test_docs_prints_chinese_pages() -> None:
    listed = docs("--lang", "zh").stdout
    assert {
        f"docs/zh/learn/{name}.md" for name in re.findall(r"^  (\S+)", listed, re.MULTILINE)
    } == {*WRITTEN} - {"README.zh-CN.md", "docs/zh/learn/README.md"}
    assert docs("ranks", "--lang", "zh").stdout.startswith("# rank、world 与 local rank")
    assert "小时" in docs("failures", "--lang", "zh").stdout
    assert "<=" not in docs("failures", "--lang", "zh").stdout.split("## 多久")[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["script", "--lang", "zh"], "docs script: no page in zh; try: shoal docs script"),
        (["memory", "--lang", "zh"], "no page in zh; try: shoal docs start/memory"),
        (["rankz", "--lang", "zh"], "docs rankz: no such page; try: shoal docs ranks"),
        (["ranks", "--lang", "fr"], "no pages in fr, only en, zh; try: shoal docs --lang zh"),
    ],
)
def test_a_page_that_is_not_there_names_the_next(words: list[str], message: str) -> None:
    done = docs(*words)
    assert message in str(done.exception)
