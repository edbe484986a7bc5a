"""Open every learning page of build/site in headless Chromium, and use its simulator, sliders and exercises.

    python tests/proof/learn_site.py --build        # result: proof/results/learn-site.json
    python tests/proof/learn_site.py --pictures F   # and a picture of every page into the folder F

A static server on this machine serves the site; the browser has no other network. Each page, of
both languages, is opened at 1280 and 390 pixels, light and dark, and without scripts. Chinese
needs a font on this machine, as apt's fonts-wqy-microhei. What must hold: no request
elsewhere, no complaint in the console, no page wider than the screen, every drawing loaded; the
simulator draws, names a deadlock, and scores the author's programs as the author does; a right
answer is accepted and a usual mistake named. The exit status is 1 if something else is seen.
"""

from __future__ import annotations

import functools
import gzip
import http.server
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
from chromium import Browser, find_chromium

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "website"))

from browser_zip import MODULES  # noqa: E402

CHINESE = "zh/learn"
LEAST_WORDS, LEAST_LETTERS = 150, 500
"""Words of an English page and letters of a Chinese one, without scripts."""
SITE, RESULT = ROOT / "build" / "site", ROOT / "proof" / "results" / "learn-site.json"
PYODIDE = SITE / "_static" / "pyodide"
WAIT_S = 60.0
WAYS = [(width, dark) for width in (1280, 390) for dark in (False, True)]
MOST_BYTES, MOST_PACKED_BYTES, MOST_CPU_S = 15e6, 6e6, 6.0


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


def serve() -> tuple[http.server.ThreadingHTTPServer, str]:
    """Start a static server; return it and its address."""
    handler = functools.partial(QuietHandler, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_address[1]}"


def wait_for(browser: Browser, code: str) -> Any:
    """Evaluate an expression until it is true; return its value."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if value := browser.evaluate(code):
            return value
        time.sleep(0.1)
    return None


def all_pages() -> list[str]:
    """Return the learning pages of both languages, as addresses without their ending."""
    found = [path for folder in ("learn", CHINESE) for path in (SITE / folder).glob("*.html")]
    return sorted(str(path.relative_to(SITE).with_suffix("")) for path in found)


def look(
    browser: Browser, address: str, page: str, pictures: Path | None
) -> tuple[dict[str, Any], list[str]]:
    """Open one page in every way; return what was seen, and what is wrong."""
    seen: dict[str, Any] = {}
    wrong = []
    for width, dark in WAYS:
        browser.open(f"{address}/{page}.html", width=width, dark=dark)
        name = f"{width}-{'dark' if dark else 'light'}"
        wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        broken = "[...document.images].filter((i) => !i.complete || !i.naturalWidth).length"
        found = {
            "overflow": browser.evaluate(wider),
            "broken": browser.evaluate(broken),
            "elsewhere": [url for url in browser.requests() if not url.startswith(address)],
            "complaints": browser.complaints(),
        }
        if any(found.values()):
            wrong.append(f"{page} {name}: {found}")
        seen[name] = found
        if pictures is not None:
            browser.screenshot(pictures / f"{page.replace('/', '-')}-{name}.png")
    browser.open(f"{address}/{page}.html", scripts=False)
    words = browser.evaluate("document.querySelector('article').innerText.split(/\\s+/).length")
    letters = browser.evaluate(
        "(document.querySelector('article').innerText.match(/\\p{Script=Han}/gu) ?? []).length"
    )
    seen["words without scripts"] = letters if page.startswith(CHINESE) else words
    if words < LEAST_WORDS and not (page.startswith(CHINESE) and letters > LEAST_LETTERS):
        wrong.append(f"{page}: {words} words, {letters} Chinese letters without scripts")
    return seen, wrong


def press(browser: Browser, button: str) -> str:
    """Press a button of the page's first simulator and return its answer."""
    browser.evaluate(
        "window.place = document.querySelector('[data-python]');"
        f"[...place.querySelectorAll('button')].find((b) => b.textContent === '{button}').click()"
    )
    done = (
        "(() => { const t = place.querySelector('output').innerText;"
        " return t && !t.includes('…') ? t : ''; })()"
    )
    return str(wait_for(browser, done))


def try_simulator(browser: Browser, address: str) -> tuple[dict[str, Any], list[str]]:
    """Draw a walk; run the author's eight programs and one that ends in a deadlock."""
    wrong = []
    browser.open(f"{address}/learn/inside-layers.html")
    before_s = cpu_seconds(browser)
    drawn = press(browser, "Draw")
    spent_s = cpu_seconds(browser) - before_s
    if spent_s > MOST_CPU_S:
        wrong.append(f"the first drawing took {spent_s:.1f} CPU s")
    if not wait_for(browser, "place.querySelector('.picture img')?.naturalWidth > 500"):
        wrong.append(f"inside-layers: nothing drawn: {drawn}")
    browser.open(f"{address}/learn/planning.html")
    planned = press(browser, "Plan")
    if not planned.startswith("1. ") or "per step" not in planned:
        wrong.append(f"planning: {planned}")
    browser.open(f"{address}/learn/puzzles.html")
    scores = {}
    for number, (steps, held) in enumerate(AUTHOR):
        browser.evaluate(
            "window.place = document.querySelector('[data-python]');"
            f"place.querySelector('select').value = '{number}';"
            "place.querySelector('select').dispatchEvent(new Event('change'))"
        )
        press_author(browser)
        scores[number] = press(browser, "Run").splitlines()
        if not scores[number] or scores[number][0].split() != [
            "yours",
            steps,
            "steps",
            held,
            "numbers",
        ]:
            wrong.append(f"puzzle {number}: {scores[number]}")
    stuck = (
        "async def program(m):\\n    m.empty(0, 0)\\n    if m.rank:\\n"
        "        await m.all_reduce(0)\\n    await m.receive(1, 1)\\n"
    )
    browser.evaluate(
        "place.querySelector('select').value = '2';"
        f"place.querySelector('textarea').value = '{stuck}'"
    )
    deadlock = press(browser, "Run")
    if "deadlock: rank 0 waits in receive for rank 1" not in deadlock:
        wrong.append(f"no deadlock is named: {deadlock}")
    wrong += [f"simulator asked for {url}" for url in browser.requests() if address not in url]
    return {
        "first_drawing_cpu_s": round(spent_s, 2),
        "drawn": drawn,
        "planned": planned,
        "scores": scores,
        "deadlock": deadlock,
    }, wrong


def try_chinese(browser: Browser, address: str) -> tuple[dict[str, Any], list[str]]:
    """Draw in a Chinese page, read its sliders and exercises, and follow the link to English."""
    wrong = []
    browser.open(f"{address}/{CHINESE}/inside-layers.html")
    drawn = press(browser, "画图")
    if "单进程一致" not in drawn:
        wrong.append(f"the simulator answers in a Chinese page: {drawn}")
    browser.open(f"{address}/{CHINESE}/targets.html")
    widget = browser.evaluate("document.querySelector('[data-widget]').innerText")
    if "偏差 40 %" not in widget or "rank 0 的目标数" not in widget:
        wrong.append(f"sliders of a Chinese page: {widget}")
    form = browser.evaluate("""(() => {
        const form = document.querySelector("form.answer");
        form.querySelector("input").value = "3.5";
        form.querySelector("button").click();
        return form.innerText + form.querySelector("output").textContent; })()""")
    if "那是各 rank 平均值的平均值" not in form or "检查" not in form:
        wrong.append(f"exercise of a Chinese page: {form}")
    links = browser.evaluate("document.querySelector('.language a').href")
    if links != f"{address}/learn/targets.html":
        wrong.append(f"the link to English leads to {links}")
    return {"drawn": drawn, "widget": widget, "exercise": form}, wrong


FOUND = (
    ("zh/", "梯度累积", "learn/precision"), ("zh/", "环形注意力", "learn/inside-layers"),
    ("zh/", "死锁", "learn/ranks"), ("zh/", "断点续训 检查点", "learn/failures"),
    ("zh/", "气泡", "learn/pipelines"), ("zh/", "联邦学习", "learn/diloco"),
    ("", "gradient accumulation", "learn/precision"), ("", "ring attention", "learn/inside-layers"),
)  # fmt: skip
"""(site, question, page that must be among the first results)."""


def try_search(browser: Browser, address: str) -> tuple[dict[str, Any], list[str]]:
    """Ask both sites' search; return the first results, and what was not found."""
    seen, wrong = {}, []
    for site, question, page in FOUND:
        browser.open(f"{address}/{site}search.html?q={quote(question)}")
        links = wait_for(
            browser,
            "(() => { const a = [...document.querySelectorAll('#search-results li a')];"
            " return a.length ? a.slice(0, 12).map((one) => one.href) : null; })()",
        )
        names = [one.partition(f"{address}/{site}")[2].partition(".html")[0] for one in links or []]
        seen[question] = list(dict.fromkeys(names))
        if page not in names:
            wrong.append(f"search for {question!r} finds {names}")
    return seen, wrong


def cpu_seconds(browser: Browser) -> float:
    """Return the processor seconds of the browser's processes so far."""
    own = psutil.Process(browser.process.pid)
    times = [one.cpu_times() for one in (own, *own.children(recursive=True))]
    return sum(one.user + one.system for one in times)


AUTHOR = (
    ("16.5", "2,621,440"), ("16.5", "1,966,080"), ("5.1", "1,835,008"), ("19.9", "2,752,512"),
    ("19.9", "2,359,296"), ("66.9", "3,145,728"), ("33.3", "4,194,304"), ("15.5", "966,656"),
)  # fmt: skip
"""Steps and numbers held of the author's programs, as the notebook prints them."""


def press_author(browser: Browser) -> None:
    """Load the author's program into the field."""
    browser.evaluate(
        "place.querySelector('textarea').value = '';"
        "[...place.querySelectorAll('button')].find((b) => b.textContent.includes('author')).click()"
    )
    wait_for(browser, "place.querySelector('textarea').value.length > 60")


def try_exercises(browser: Browser, address: str) -> list[str]:
    """Type the answer and one mistake into every exercise of every page."""
    wrong = []
    for page in all_pages():
        browser.open(f"{address}/{page}.html")
        found = browser.evaluate("""
            [...document.querySelectorAll("form.answer")].map((form) => {
              const one = JSON.parse(form.dataset.exercise);
              const field = form.querySelector("input, select");
              const type = (text) => {
                field.value = text;
                form.querySelector("button").click();
                return form.querySelector("output").textContent;
              };
              const [value, reason] = one.mistakes[0];
              const right = document.documentElement.lang.startsWith("zh") ? "”正确。" : " is right. ";
              return [one.name, type(String(one.answer)).includes(right),
                type(String(value)).includes(reason)];
            })
        """)
        wrong += [f"{page}, {name}: right {right}, mistake {mistake}" for name, right, mistake in found
                  if not (right and mistake)]  # fmt: skip
    return wrong


NODE = """
const folder = process.argv[1];
const fs = require("node:fs");
const { loadPyodide } = require(`${folder}/pyodide.js`);
(async () => {
  const python = await loadPyodide({ indexURL: `${folder}/` });
  const packed = new Uint8Array(fs.readFileSync(`${folder}/shoal.zip`));
  python.unpackArchive(packed, "zip", { extractDir: "/shoal" });
  python.globals.set("names", process.argv.slice(2));
  console.log(python.runPython(`
import sys
sys.path.insert(0, "/shoal")
for name in names:
    __import__(name)
strange = {one.split(".")[0] for one in sys.modules} - set(sys.stdlib_module_names)
" ".join(sorted(one for one in strange if "pyodide" not in one))
`));
  const spent = process.cpuUsage();
  console.log(((spent.user + spent.system) / 1e6).toFixed(2));
})();
"""
"""Loads the site's Pyodide under node; prints what was imported beside the standard library, and CPU s."""


def try_node() -> tuple[dict[str, Any], list[str]]:
    """Import every module of the zip under node: Shoal and the standard library, nothing else."""
    done = subprocess.run(
        ["node", "-e", NODE, str(PYODIDE), *MODULES], capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    wrong = [] if lines[:1] == ["__main__ shoal"] else [f"under node: {lines} {done.stderr[-300:]}"]
    return {"imported": lines[:1], "cpu_s": lines[-1:]}, wrong


def count_bytes() -> tuple[float, float]:
    """Return the simulator's bytes, raw and as a server packs them."""
    files = sorted(PYODIDE.iterdir())
    packed = sum(len(gzip.compress(path.read_bytes(), 9)) for path in files)
    return float(sum(path.stat().st_size for path in files)), float(packed)


def main() -> int:
    """Look at everything and write the result."""
    if "--build" in sys.argv:
        subprocess.run(["make", "docs"], cwd=ROOT, check=True)
    at = sys.argv.index("--pictures") + 1 if "--pictures" in sys.argv else 0
    pictures = Path(sys.argv[at]) if at else None
    server, address = serve()
    browser = Browser(find_chromium())
    record: dict[str, Any] = {
        "chromium": browser.call("Browser.getVersion")["product"],
        "pages": {},
    }
    wrong: list[str] = []
    try:
        for page in all_pages():
            record["pages"][page], found = look(browser, address, page, pictures)
            wrong += found
        record["chinese"], found = try_chinese(browser, address)
        wrong += found
        record["search"], found = try_search(browser, address)
        wrong += found
        record["simulator"], found = try_simulator(browser, address)
        wrong += found + try_exercises(browser, address)
    finally:
        browser.close()
        server.shutdown()
    record["node"], found = try_node()
    wrong += found
    raw, packed = count_bytes()
    record |= {"simulator_bytes": raw, "simulator_packed_bytes": packed}
    if raw > MOST_BYTES or packed > MOST_PACKED_BYTES:
        wrong.append(f"the simulator has {raw:,.0f} bytes, {packed:,.0f} packed")
    record["wrong"] = wrong
    RESULT.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.stdout.write("".join(f"{line}\n" for line in wrong) or f"all is well: {RESULT}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
