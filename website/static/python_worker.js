// Runs Shoal's simulator in a worker, so that a program of yours that never ends can be stopped.
"use strict";
const here = new URL("pyodide/", self.location.href).href;
importScripts(`${here}pyodide.js`);
const ready = (async () => {
  const python = await loadPyodide({ indexURL: here });
  const packed = await fetch(`${here}shoal.zip`);
  python.unpackArchive(new Uint8Array(await packed.arrayBuffer()), "zip", { extractDir: "/shoal" });
  python.runPython("import sys; sys.path.insert(0, '/shoal')");
  const call = python.runPython("from shoal.teach.browser import call; call");
  self.postMessage({ ready: true });
  return call;
})();
self.onmessage = async (message) => {
  const { number, request, messages } = message.data;
  try {
    const call = await ready;
    self.postMessage({ number, answer: JSON.parse(call(JSON.stringify(request), JSON.stringify(messages))) });
  } catch (failure) {
    self.postMessage({ number, answer: { error: String(failure).split("\n").filter(Boolean).pop() } });
  }
};
