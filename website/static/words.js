// Words of sliders, forms and the simulator in the language of the page. On an English page: as they are.
// As src/shoal/teach/drawings/word_translation.py: `#` stands for figures; a test compares both.
"use strict";
const shoalWords = (() => {
  const one = "[A-Za-z_]{0,2}\\d+(?:[.,/]\\d+)*(?: (?:[KMGT]iB|[kMGT]?B|µs|ms|s|min)\\b)?";
  const figures = new RegExp(`${one}(?:,? ${one})*`, "g");
  const messages = typeof shoalMessages === "undefined" ? {} : shoalMessages;
  return {
    messages,
    text(english) {
      const found = messages[english.replace(figures, "#")];
      if (!found) return english;
      const rest = english.match(figures) ?? [];
      return found.replace(/#/g, () => rest.shift() ?? "");
    },
  };
})();
if (typeof module !== "undefined") module.exports = shoalWords;
