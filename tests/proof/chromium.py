"""Headless Chromium by its DevTools pipe: pages from a disk, their requests, console and DOM.

Chromium reads commands at file descriptor 3 and writes answers at 4, JSON texts that end with
a zero byte (--remote-debugging-pipe): no port, no package.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--remote-debugging-pipe", "--proxy-server=127.0.0.1:9",
)  # fmt: skip
ANSWER_S = 60.0


def find_chromium() -> str:
    """Return the path of Chromium; "" if this machine has none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), "")


class Browser:
    """A headless Chromium with one page at a time."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        theirs, self._in = os.pipe()
        self._out, theirs_out = os.pipe()

        def pass_pipes() -> None:
            # 3 and 4 may be among our own descriptors: move both away first.
            read, write = os.dup(theirs), os.dup(theirs_out)
            os.dup2(read, 3)
            os.dup2(write, 4)

        self.process = subprocess.Popen(
            [program, *OPTIONS, f"--user-data-dir={self._profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=pass_pipes,
            close_fds=False,
        )
        os.close(theirs)
        os.close(theirs_out)
        self._numbers, self._read, self.events = itertools.count(1), b"", []  # type: ignore[var-annotated]
        self.session = ""

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events that come before it are kept."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        until_s = time.monotonic() + ANSWER_S
        while True:
            answer = self._next(until_s)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self.events.append(answer)

    def _next(self, until_s: float) -> dict[str, Any]:
        while b"\0" not in self._read:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([self._out], [], [], left_s)[0]:
                raise TimeoutError("Chromium gave no answer")
            more = os.read(self._out, 1 << 20)
            if not more:
                raise EOFError("Chromium has ended")
            self._read += more
        line, _, self._read = self._read.partition(b"\0")
        return dict(json.loads(line))

    def open(
        self, path: Path | str, *, width: int = 1280, dark: bool = False, scripts: bool = True
    ) -> None:
        """Open a file, or an address of this machine, without network, and wait until it is drawn."""
        self.session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session, self.events = attached["sessionId"], []
        for domain in ("Page", "Runtime", "Log", "Network", "Security"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        url = path if isinstance(path, str) else path.resolve().as_uri()
        self.call("Page.navigate", url=url)
        until_s = time.monotonic() + ANSWER_S
        while not any(one.get("method") == "Page.loadEventFired" for one in self.events):
            self.events.append(self._next(until_s))
        time.sleep(0.3)  # a script that a page starts late would start now
        self.call("Page.getLayoutMetrics")

    def requests(self) -> list[str]:
        """Return the URLs that the page asked for besides itself and data: URLs."""
        urls = [
            one["params"]["request"]["url"]
            for one in self.events
            if one.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in urls[1:] if not url.startswith("data:")]

    def complaints(self) -> list[str]:
        """Return errors and warnings of the console, of scripts and of the security policy."""
        found = []
        for one in self.events:
            body = one.get("params", {})
            if one.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(body["exceptionDetails"])[:300])
            elif one.get("method") == "Log.entryAdded" and body["entry"]["level"] != "verbose":
                found.append(body["entry"]["text"][:300])
            elif one.get("method") == "Runtime.consoleAPICalled":
                found.append(json.dumps(body["args"])[:300])
        return found

    def evaluate(self, code: str) -> Any:
        """Return the value of an expression in the page, also if its scripts are off."""
        return self.call("Runtime.evaluate", expression=code, returnByValue=True)["result"].get(
            "value"
        )

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {
            "x": 0,
            "y": 0,
            "width": size["width"],
            "height": min(size["height"], 12_000),
            "scale": 1,
        }
        data = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser."""
        self.session = ""
        with contextlib.suppress(Exception):
            self.call("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()
        for end in (self._in, self._out):
            os.close(end)
        shutil.rmtree(self._profile, ignore_errors=True)
