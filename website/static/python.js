// The simulator in the page: it loads at the first press of a button, from this site alone.
"use strict";
(() => {
  const places = document.querySelectorAll("[data-python]");
  if (!places.length) return;
  const LIMIT_MS = 20000, t = shoalWords.text;
  const script = document.currentScript ? document.currentScript.src
    : [...document.scripts].map((one) => one.src).find((src) => src.includes("python.js"));
  let worker = null, count = 0, loaded = Promise.resolve();
  const waiting = new Map();

  function start() {
    // The Chinese site lies in a folder of the English one, which has the simulator.
    const folder = document.documentElement.lang.startsWith("zh") ? "../../_static/" : "";
    worker = new Worker(new URL(`${folder}python_worker.js`, script));
    let tell;
    loaded = new Promise((resolve) => {
      tell = resolve;
    });
    worker.onmessage = (message) => {
      if (message.data.ready) return tell();
      waiting.get(message.data.number)?.(message.data.answer);
      waiting.delete(message.data.number);
    };
    worker.onerror = () => {
      for (const answer of waiting.values()) {
        answer({ error: t("The simulator could not be loaded. Start the site with make docs-open.") });
      }
      waiting.clear();
      worker = null;
    };
  }

  function ask(request) {
    if (!worker) {
      try {
        start();
      } catch {
        return Promise.resolve({ error: t("A page from a file loads no simulator: start the site with make docs-open.") });
      }
    }
    const number = ++count;
    return new Promise((resolve) => {
      let late = 0;
      loaded.then(() => {
        late = setTimeout(() => {
          worker?.terminate();
          worker = null;
          waiting.clear();
          resolve({ error: t(`Stopped after ${LIMIT_MS / 1000} s: does the program end?`) });
        }, LIMIT_MS);
      });
      waiting.set(number, (answer) => {
        clearTimeout(late);
        resolve(answer);
      });
      worker.postMessage({ number, request, messages: shoalWords.messages });
    });
  }

  const add = (tag, parent, text, attributes = {}) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text) made.textContent = text;
    parent.append(made);
    return made;
  };

  function numberField(row, label, least, most, first) {
    const box = add("label", row, `${label} `);
    return add("input", box, "", { type: "number", min: least, max: most, value: first });
  }

  const whole = (field) => Math.trunc(Number(field.value));

  async function show(place, request) {
    const out = place.querySelector("output"), picture = place.querySelector(".picture");
    out.className = "";
    out.textContent = worker ? t("Computing …") : t("Loading the simulator (once, 12 MB) …");
    const answer = await ask(request);
    out.textContent = "";
    out.className = answer.error ? "wrong" : "";
    for (const line of answer.error ? [answer.error] : answer.lines) add("span", out, line);
    picture.replaceChildren();
    if (answer.svg) {
      const image = add("img", picture, "", { alt: t("The drawing of this run") });
      image.src = URL.createObjectURL(new Blob([answer.svg], { type: "image/svg+xml" }));
    }
    return answer;
  }

  const STUB = "async def program(m):\n    # m.rank, m.ranks, m.layers, m.batches\n    m.load(0)\n";

  const FORMS = {
    puzzle(place, row) {
      const box = add("label", row, `${t("puzzle")} `);
      const number = add("select", box);
      for (let n = 0; n < 8; n++) add("option", number, `${n}`);
      const code = add("textarea", place, "", { rows: "16", spellcheck: "false", "aria-label": t("your program") });
      code.value = document.querySelector(".highlight-python pre")?.textContent ?? STUB;
      number.addEventListener("change", () => {
        code.value = STUB;
      });
      const author = add("button", row, t("Show the author's"), { type: "button" });
      author.addEventListener("click", async () => {
        const answer = await ask({ what: "author", number: whole(number) });
        if (answer.code) code.value = answer.code;
      });
      return () => ({ what: "puzzle", number: whole(number), code: code.value });
    },
    walk(place, row) {
      const label = place.dataset.name === "local-steps" ? t("islands") : t("ranks");
      const ranks = numberField(row, label, 2, Number(place.dataset.most ?? 8), Number(place.dataset.ranks ?? 4));
      return () => ({ what: "walk", name: place.dataset.name, ranks: whole(ranks) });
    },
    plan(place, row) {
      const box = add("label", row, `${t("model")} `);
      const model = add("select", box);
      for (const one of ["gpt-3-1.3b", "llama-2-7b", "llama-3-8b", "llama-3-70b", "gpt-3-175b"]) add("option", model, one);
      model.value = "llama-3-8b";
      const machines = add("input", add("label", row, `${t("machines")} `), "", { type: "text", size: 16, value: "8xH100-80GB" });
      const samples = numberField(row, t("samples per step"), 1, 100000, 512);
      return () => ({ what: "plan", model: model.value, machines: machines.value, samples: whole(samples) });
    },
    pipeline(place, row) {
      const box = add("label", row, `${t("schedule")} `);
      const name = add("select", box);
      for (const one of ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipe"]) add("option", name, one);
      name.value = "1f1b";
      const ranks = numberField(row, t("ranks"), 2, 16, 4), micro = numberField(row, t("micro-batches"), 1, 64, 8);
      return () => ({ what: "pipeline", name: name.value, ranks: whole(ranks), micro_batches: whole(micro) });
    },
  };

  for (const place of places) {
    place.replaceChildren();
    place.classList.add("python");
    add("p", place, place.dataset.title ?? t("Try it here"), { class: "title" });
    const row = add("div", place, "", { class: "row" });
    const request = FORMS[place.dataset.python](place, row);
    const label = { puzzle: t("Run"), plan: t("Plan") }[place.dataset.python] ?? t("Draw");
    const button = add("button", row, label, { type: "button" });
    add("output", place, "", { "aria-live": "polite" });
    add("div", place, "", { class: "picture" });
    button.addEventListener("click", () => show(place, request()));
  }
})();
