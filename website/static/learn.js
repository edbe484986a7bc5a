// Sliders and answers of the learning pages. No request, no library; without it a page reads the same.
"use strict";
(() => {
  const number = (value, digits = 3) => Number(value.toPrecision(digits)).toLocaleString("en");
  const seconds = (s) => (s >= 1 ? `${number(s)} s` : s >= 1e-3 ? `${number(s * 1e3)} ms` : `${number(s * 1e6)} µs`);
  const bytes = (b) => (b >= 1e9 ? `${number(b / 1e9)} GB` : `${number(b / 1e6)} MB`);
  const fill = (text, ...words) => text.replace(/\{\}/g, () => words.shift());
  const SVG = "http://www.w3.org/2000/svg";
  const f = shoalFormulas, t = shoalWords.text;

  // One slider: name, label, least, most, first; log: steps are powers of two or ten.
  const WIDGETS = {
    amdahl: {
      title: t("Amdahl's law"),
      sliders: [
        ["serial", t("serial share of the step, %"), 0, 30, 5, 0.5],
        ["power", t("devices"), 0, 12, 6, 1],
      ],
      curve: (v) => ({
        points: Array.from({ length: 13 }, (_, p) => [p, Math.log2(f.amdahl(v.serial / 100, 2 ** p))]),
        ideal: Array.from({ length: 13 }, (_, p) => [p, p]),
        at: [v.power, Math.log2(f.amdahl(v.serial / 100, 2 ** v.power))],
        labels: [t("devices (each mark doubles)"), t("times as fast (each mark doubles)")],
      }),
      lines: (v) => {
        const n = 2 ** v.power, s = f.amdahl(v.serial / 100, n);
        return [t(`${number(n, 5)} devices: ${number(s)} times as fast, ${number((100 * s) / n)} % efficient.`),
          v.serial ? t(`Endless devices: ${number(100 / v.serial)} times.`) : t("Endless devices: no limit.")];
      },
    },
    "alpha-beta": {
      title: t("A step with communication"),
      sliders: [
        ["single", t("step on one device, ms"), 50, 2000, 1000, 50],
        ["power", t("devices"), 0, 7, 4, 1],
        ["gb", t("gradients, GB"), 0.1, 10, 2.4, 0.1],
        ["rate", t("link, GB/s"), 1, 400, 25, 1],
        ["alpha", t("latency, µs"), 1, 200, 20, 1],
        ["overlap", t("share of compute that hides messages, %"), 0, 66, 0, 1],
      ],
      curve: (v) => {
        const speed = (n, volume) => v.single / 1e3 /
          f.stepSeconds(v.single / 1e3, n, v.gb * 1e9, v.alpha * 1e-6, v.rate * 1e9, volume, v.overlap / 100);
        return {
          points: Array.from({ length: 8 }, (_, p) => [p, Math.log2(speed(2 ** p, 1))]),
          other: Array.from({ length: 8 }, (_, p) => [p, Math.log2(speed(2 ** p, 1.5))]),
          ideal: Array.from({ length: 8 }, (_, p) => [p, p]),
          at: [v.power, Math.log2(speed(2 ** v.power, 1))],
          labels: [t("devices (each mark doubles)"), t("times as fast: ddp, fsdp below")],
        };
      },
      lines: (v) => {
        const n = 2 ** v.power, one = v.single / 1e3;
        const ring = f.ringSeconds(n, v.gb * 1e9, v.alpha * 1e-6, v.rate * 1e9);
        const step = f.stepSeconds(one, n, v.gb * 1e9, v.alpha * 1e-6, v.rate * 1e9, 1, v.overlap / 100);
        return [t(`Compute ${seconds(one / n)}, all-reduce ${seconds(ring)}, step ${seconds(step)}.`),
          t(`${n} devices: ${number(one / step)} times as fast.`)];
      },
    },
    targets: {
      title: t("Two ranks, two counts of targets"),
      sliders: [
        ["countA", t("targets of rank 0"), 1, 100, 10, 1],
        ["lossA", t("mean loss of rank 0"), 0, 10, 2, 0.1],
        ["countB", t("targets of rank 1"), 1, 100, 2, 1],
        ["lossB", t("mean loss of rank 1"), 0, 10, 5, 0.1],
      ],
      lines: (v) => {
        const right = f.meanOfTargets(v.countA, v.lossA, v.countB, v.lossB);
        const wrong = f.meanOfMeans(v.lossA, v.lossB);
        return [t(`Mean over all ${v.countA + v.countB} targets: ${number(right, 4)}.`),
          t(`Mean of the two means: ${number(wrong, 4)}; ${number((100 * (wrong - right)) / (right || 1))} % off.`)];
      },
    },
    states: {
      title: t("States of one rank"),
      sliders: [
        ["billions", t("parameters, billion"), 1, 100, 7, 1],
        ["power", t("ranks"), 0, 10, 3, 1],
      ],
      lines: (v) => ["DDP", "ZeRO-1", "ZeRO-2", t("ZeRO-3, FSDP")].map(
        (name, stage) => name + t(": ") + bytes(f.stateBytes(stage, 2 ** v.power, v.billions * 1e9))),
    },
    bubble: {
      title: t("Bubble of GPipe and 1F1B"),
      sliders: [
        ["ranks", t("ranks p"), 2, 32, 4, 1],
        ["micro", t("micro-batches m"), 1, 128, 8, 1],
      ],
      lines: (v) => [
        t(`Idle: (p − 1)/(m + p − 1) = ${number(100 * f.bubbleShare(v.ranks, v.micro))} % of the step.`),
        t(`Rank 0 holds ${v.micro} micro-batches under GPipe, ${Math.min(v.micro, v.ranks)} under 1F1B.`),
      ],
    },
    young: {
      title: t("How often to save"),
      sliders: [
        ["stall", t("stall of a save, s"), 1, 300, 60, 1],
        ["hours", t("hours between failures"), 0.5, 100, 3.1, 0.1],
      ],
      lines: (v) => {
        const every = f.youngSeconds(v.stall, v.hours * 3600);
        const again = (50 * every) / (v.hours * 3600);
        return [t(`Save every ${number(every / 60)} minutes of work (Young).`),
          t(`Saves cost ${number((100 * v.stall) / every)} %, repeated work ${number(again)} %.`)];
      },
    },
  };

  const element = (tag, parent, text, attributes = {}) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text) made.textContent = text;
    parent.append(made);
    return made;
  };

  function draw(box, curve) {
    box.replaceChildren();
    const [w, h, m] = [420, 210, 28];
    const all = [...curve.points, ...curve.ideal];
    const [xs, ys] = [Math.max(...all.map((p) => p[0])), Math.max(...all.map((p) => p[1]))];
    const x = (v) => m + (v / xs) * (w - 2 * m), y = (v) => h - m - (Math.max(0, v) / ys) * (h - 2 * m);
    const add = (tag, attributes, text) => {
      const made = document.createElementNS(SVG, tag);
      for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
      if (text) made.textContent = text;
      box.append(made);
    };
    const path = (points) => points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
    for (let p = 0; p <= xs; p++) add("line", { x1: x(p), x2: x(p), y1: m, y2: h - m, class: "grid" });
    add("path", { d: path(curve.ideal), class: "ideal" });
    if (curve.other) add("path", { d: path(curve.other), class: "other" });
    add("path", { d: path(curve.points), class: "own" });
    add("circle", { cx: x(curve.at[0]), cy: y(curve.at[1]), r: 5 });
    add("text", { x: w / 2, y: h - 6, "text-anchor": "middle" }, curve.labels[0]);
    add("text", { x: m, y: 16 }, curve.labels[1]);
  }

  function build(place) {
    const widget = WIDGETS[place.dataset.widget];
    if (!widget) return;
    place.replaceChildren();
    element("p", place, widget.title, { class: "title" });
    const values = {}, shown = {};
    const list = element("div", place, "", { class: "sliders" });
    let chart = null;
    if (widget.curve) {
      chart = document.createElementNS(SVG, "svg");
      chart.setAttribute("viewBox", "0 0 420 210");
      chart.setAttribute("role", "img");
      chart.setAttribute("aria-label", widget.title);
      place.append(chart);
    }
    const out = element("output", place, "", { "aria-live": "polite" });
    const show = () => {
      for (const [name] of widget.sliders) {
        const value = values[name];
        shown[name].textContent = name === "power" ? `${2 ** value}` : `${value}`;
      }
      if (chart) draw(chart, widget.curve(values));
      out.replaceChildren();
      for (const line of widget.lines(values)) element("span", out, line);
    };
    for (const [name, label, least, most, first, step] of widget.sliders) {
      values[name] = first;
      const row = element("label", list);
      element("span", row, label);
      const slider = element("input", row, "", { type: "range", min: least, max: most, step, value: first });
      shown[name] = element("b", row);
      slider.addEventListener("input", () => {
        values[name] = Number(slider.value);
        show();
      });
    }
    show();
  }

  function check(form) {
    const one = JSON.parse(form.dataset.exercise);
    const out = form.querySelector("output");
    const typed = form.querySelector("input, select").value.trim();
    const close = (right, got) => typeof right === "string" ? right === got
      : Math.abs(got - right) <= 0.01 * Math.abs(right) + 1e-9;
    const got = one.choices.length ? typed : Number.parseFloat(typed.replace(/,/g, "").replace("−", "-"));
    out.className = "wrong";
    if (typed === "" || Number.isNaN(got)) {
      out.textContent = t("A number is wanted.");
    } else if (close(one.answer, got)) {
      out.className = "right";
      out.textContent = fill(t("{} is right. {}"), one.text, one.because);
    } else {
      const found = one.mistakes.find(([value]) => close(value, got));
      out.textContent = found ? fill(t("Not {}: {}."), typed, found[1]) : fill(t("Not {}. The hints help."), typed);
    }
  }

  for (const place of document.querySelectorAll("[data-widget]")) build(place);
  for (const form of document.querySelectorAll("form.answer")) {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      check(form);
    });
  }
})();
