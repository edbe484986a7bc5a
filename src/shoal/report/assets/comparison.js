(function () {
  "use strict";
  // The legend switches runs in all charts.
  var hidden = {}, entries = document.querySelectorAll("#runs [data-run]");
  function show() {
    entries.forEach(function (entry) {
      var off = !!hidden[entry.getAttribute("data-run")];
      entry.setAttribute("aria-pressed", off ? "false" : "true");
    });
    document.dispatchEvent(new CustomEvent("shown-runs", { detail: hidden }));
  }
  function press(entry, alone) {
    var own = entry.getAttribute("data-run");
    if (alone) {
      var others = [].some.call(entries, function (one) {
        var run = one.getAttribute("data-run");
        return run !== own && !hidden[run];
      });
      entries.forEach(function (one) {
        var run = one.getAttribute("data-run");
        hidden[run] = others && run !== own;
      });
    } else {
      hidden[own] = !hidden[own];
    }
    show();
  }
  entries.forEach(function (entry) {
    entry.setAttribute("role", "button");
    entry.setAttribute("tabindex", "0");
    entry.setAttribute("title", "click: hide or show; double-click: this one alone");
    entry.addEventListener("click", function (event) { if (event.detail < 2) press(entry, false); });
    entry.addEventListener("dblclick", function () { press(entry, true); });
    entry.addEventListener("keydown", function (event) {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      press(entry, event.shiftKey);
    });
  });
  if (entries.length) {
    var hint = document.createElement("span");
    hint.textContent = "click a run to hide it, double-click to see it alone";
    entries[0].parentNode.append(hint);
    show();
  }

  // A press on a head sorts the rows; numbers by `value` of their <data>, unknown ones last.
  function value(row, column) {
    var cell = row.cells[column], data = cell.querySelector("data");
    if (data) return +data.value;
    var text = cell.textContent.trim();
    if (text === "–" || text === "") return null;
    return text !== "" && isFinite(text) ? +text : text;
  }
  function compare(a, b, way) {
    if (a === null || b === null) return (a === null) - (b === null);
    if (typeof a === "number" && typeof b === "number") return way * (a - b);
    return way * String(a).localeCompare(String(b), undefined, { numeric: true });
  }
  document.querySelectorAll(".sortable table").forEach(function (table) {
    var heads = table.tHead.rows[0].cells, body = table.tBodies[0];
    [].forEach.call(heads, function (head, column) {
      head.setAttribute("tabindex", "0");
      function sort() {
        var way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        [].forEach.call(heads, function (one) { one.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
        var rows = [].slice.call(body.rows).map(function (row) { return [value(row, column), row]; });
        rows.sort(function (a, b) { return compare(a[0], b[0], way); });
        rows.forEach(function (pair) { body.append(pair[1]); });
      }
      head.addEventListener("click", sort);
      head.addEventListener("keydown", function (event) { if (event.key === "Enter") sort(); });
    });
  });
})();
