(function () {
  "use strict";
  var source = document.getElementById("data"), box = document.getElementById("controls");
  if (!source || !window.uPlot || !box) return;
  var data = JSON.parse(source.textContent);
  var state = { x: "step", log: false, smooth: 0, hidden: {} };
  var units = { step: "step", tokens: "tokens", time: "seconds of steps" };
  var charts = [], powers = [];
  for (var power = 0; power < 60; power++) powers.push(Math.pow(2, power));
  var whole = [];
  for (var ten = 1; ten < 1e15; ten *= 10) whole.push(ten, 2 * ten, 5 * ten);

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }
  // Steps → tokens or seconds, linear between the knots of the page.
  function place(run, step) {
    var knots = data.knots[run] || data.knots[0] || [], at = state.x === "tokens" ? 1 : 2;
    if (state.x === "step" || !knots.length) return step;
    var low = 0, high = knots.length - 1;
    if (step <= knots[0][0]) return knots[0][at];
    if (step >= knots[high][0]) return knots[high][at];
    while (high - low > 1) {
      var middle = (low + high) >> 1;
      if (knots[middle][0] <= step) low = middle; else high = middle;
    }
    var a = knots[low], b = knots[high];
    return a[at] + (b[at] - a[at]) * (step - a[0]) / (b[0] - a[0] || 1);
  }
  // Exponential moving average without bias at the start, as TensorBoard draws it.
  function smooth(values) {
    var last = 0, weight = 0, share = state.smooth;
    return values.map(function (value) {
      last = last * share + (1 - share) * value;
      weight = weight * share + (1 - share);
      return last / weight;
    });
  }
  function short(value, form) {
    if (value == null) return "–";
    var size = Math.abs(value);
    if (form === "bytes") {
      var names = ["B", "KiB", "MiB", "GiB", "TiB"], at = 0;
      while (size >= 1024 && at < 4) { size /= 1024; value /= 1024; at++; }
      return +value.toPrecision(4) + " " + names[at];
    }
    if (size >= 1e15 || (size && size < 1e-3)) return value.toExponential(2).replace(/\.?0+e/, "e");
    if (size >= 1e4) {
      var letters = ["", "K", "M", "B", "T"], power = Math.min(4, Math.floor(Math.log10(size) / 3 + 1e-9));
      return +(value / Math.pow(1000, power)).toPrecision(4) + letters[power];
    }
    return String(+value.toPrecision(5));
  }
  function tables(curve) {
    var found = [];
    curve.series.forEach(function (one, index) {
      var number = data.runs ? one.run : index;
      if (state.hidden[one.run]) return;
      var at = function (step) { return place(one.run, step); };
      var raw = [one.x.map(at), one.y];
      var base = one.mx.length ? [one.mx.map(at), one.my] : raw;
      if (state.smooth > 0 || one.mx.length) {
        found.push({ label: one.label, points: raw, number: number, faint: true });
        found.push({ label: one.label + (state.smooth > 0 ? ", smoothed" : ", mean"), points: [base[0], smooth(base[1])], number: number, over: true });
      } else {
        found.push({ label: one.label, points: raw, number: number });
      }
    });
    if (state.log) found.forEach(function (one) {
      one.points = [one.points[0], one.points[1].map(function (v) { return v > 0 ? v : null; })];
    });
    return found;
  }
  function draw(holder, curve) {
    var lines = tables(curve);
    if (!lines.length) return;
    var joined = uPlot.join(lines.map(function (one) { return one.points; }));
    var soft = colour("--soft"), grid = colour("--grid"), alone = curve.series.length === 1;
    var positive = joined.slice(1).some(function (ys) { return ys.some(function (v) { return v > 0; }); });
    var series = [{ label: units[state.x], value: function (u, v) { return short(v); } }];
    lines.forEach(function (one) {
      series.push({
        label: alone ? (one.over ? (state.smooth > 0 ? "smoothed" : "mean of steps around") : "value") : one.label,
        stroke: colour("--c" + one.number % 8), width: one.faint ? 1 : 1.5, alpha: one.faint ? 0.35 : 1,
        dash: one.number < 8 ? undefined : one.number < 16 ? [7, 3] : [2, 3],
        spanGaps: true, points: { show: one.points[0].length < 3 },
        value: function (u, v) { return short(v, curve.form); }
      });
    });
    var axis = { stroke: soft, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    var marks = curve.key === "loss" || curve.key === "grad_norm" ? data.marks : [];
    function idle(u) { u.root.classList.toggle("idle", u.cursor.idx == null); }
    var chart = new uPlot({
      width: holder.clientWidth, height: 210, series: series,
      padding: [10, 12, 0, 0],
      legend: { show: lines.length <= 12 },
      cursor: { sync: { key: "report" }, y: false, points: { size: 6 } },
      scales: { x: { time: false }, y: { distr: state.log && positive ? 3 : 1 } },
      axes: [
        Object.assign({}, axis, { size: 24, incrs: state.x === "step" ? whole : undefined, values: function (u, vs) { return vs.map(function (v) { return short(v); }); } }),
        Object.assign({}, axis, { size: 58, incrs: curve.form === "bytes" ? powers : undefined, values: function (u, vs) { return vs.map(function (v) { return v == null ? "" : short(v, curve.form); }); } })
      ],
      hooks: { setCursor: [idle], drawAxes: [function (u) {
        // Starts stand behind the curves, so that they hide no spike.
        u.ctx.save();
        u.ctx.strokeStyle = u.ctx.fillStyle = soft;
        u.ctx.lineWidth = devicePixelRatio;
        u.ctx.font = 11 * devicePixelRatio + "px system-ui, sans-serif";
        u.ctx.textBaseline = "top";
        (data.starts || []).forEach(function (starts, run) {
          starts.forEach(function (start) {
            var x = Math.round(u.valToPos(place(run, start[0]), "x", true)), gap = 4 * devicePixelRatio;
            var left = u.bbox.left, half = x > left + u.bbox.width / 2;
            if (!(x > left && x < left + u.bbox.width)) return;
            u.ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
            u.ctx.beginPath();
            u.ctx.moveTo(x, u.bbox.top);
            u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
            u.ctx.stroke();
            u.ctx.textAlign = half ? "right" : "left";
            u.ctx.fillText(start[1], half ? x - gap : x + gap, u.bbox.top);
          });
        });
        u.ctx.restore();
      }], draw: [function (u) {
        u.ctx.save();
        u.ctx.fillStyle = colour("--mark");
        var half = 4 * devicePixelRatio;
        marks.forEach(function (steps, run) {
          steps.forEach(function (step) {
            var x = Math.round(u.valToPos(place(run, step), "x", true));
            if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) return;
            u.ctx.beginPath();
            u.ctx.moveTo(x - half, u.bbox.top - half);
            u.ctx.lineTo(x + half, u.bbox.top - half);
            u.ctx.lineTo(x, u.bbox.top + half);
            u.ctx.fill();
          });
        });
        u.ctx.restore();
      }] }
    }, joined, holder);
    idle(chart);
    chart.root.classList.toggle("alone", lines.length === 1);
    charts.push({ chart: chart, holder: holder });
  }
  function drawAll() {
    charts.forEach(function (one) { one.chart.destroy(); });
    charts = [];
    var byKey = {};
    data.curves.forEach(function (curve) { byKey[curve.key] = curve; });
    document.querySelectorAll(".curve").forEach(function (place) {
      var curve = byKey[place.getAttribute("data-curve")], holder = place.querySelector(".live");
      if (!curve) return;
      place.hidden = false;
      if (!holder) {
        place.querySelectorAll(".frame,.legend").forEach(function (one) { one.remove(); });
        holder = document.createElement("div");
        holder.className = "live";
        place.querySelector("figure").appendChild(holder);
      }
      draw(holder, curve);
    });
  }
  function control(text, element, change) {
    var label = document.createElement("label");
    label.append(text, element);
    element.addEventListener("input", function () { change(element); drawAll(); });
    box.append(label);
  }
  function choice(values) {
    var found = document.createElement("select");
    values.forEach(function (one) {
      var option = document.createElement("option");
      option.value = one[0];
      option.textContent = one[1];
      found.append(option);
    });
    return found;
  }
  control("over", choice([["step", "steps"], ["tokens", "tokens"], ["time", "time of steps"]]), function (e) { state.x = e.value; });
  control("axis", choice([["", "linear"], ["log", "logarithmic"]]), function (e) { state.log = e.value === "log"; });
  var slider = document.createElement("input");
  slider.type = "range";
  slider.min = "0"; slider.max = "0.99"; slider.step = "0.01"; slider.value = "0";
  control("smoothing", slider, function (e) { state.smooth = +e.value; });
  var hint = document.createElement("span");
  hint.textContent = "drag to zoom, double-click to reset";
  box.append(hint);
  box.hidden = false;
  drawAll();
  var width = window.innerWidth, waiting = 0;
  window.addEventListener("resize", function () {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 100);
  });
  document.addEventListener("shown-runs", function (event) { state.hidden = event.detail; drawAll(); });
  ["(prefers-color-scheme: dark)", "print"].forEach(function (query) {
    matchMedia(query).addEventListener("change", drawAll);
  });
})();
