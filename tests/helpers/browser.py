"""A real browser: chromium without a window, spoken to over its devtools pipe."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT = 60.0  # seconds for one answer
# The browser reads commands from descriptor 3 and answers on 4.
LAUNCH = (
    "import os, sys; reader, writer = map(int, sys.argv[1:3]); "
    "spare = [os.dup(reader) for _ in range(8)]; "  # so that 3 and 4 are not in use below
    "reader, writer = os.dup(reader), os.dup(writer); "
    "os.dup2(reader, 3); os.dup2(writer, 4); "
    "[os.set_inheritable(n, True) for n in (3, 4)]; "
    "os.execvp(sys.argv[3], sys.argv[3:])"
)
LOW_CONTRAST = """(() => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => {
    const [r, g, b] = parts(text).slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const backdrop = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (parts(colour)[3] !== 0) return colour;
    }
  };
  const bad = [];
  for (const node of document.querySelectorAll("body *")) {
    const hasText = [...node.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    const style = getComputedStyle(node);
    if (!hasText || ["SCRIPT", "STYLE"].includes(node.tagName)) continue;
    if (node.getClientRects().length === 0) continue;
    const front = node instanceof SVGElement ? style.fill : style.color;
    const pair = [light(front), light(backdrop(node))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < 4.5) bad.push(`${node.tagName}.${node.getAttribute("class")} ${ratio}`);
  }
  return bad;
})()"""


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab; everything it logs, requests and throws is kept in ``events``."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._buffer = b""
        self._last = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._writer, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, method: str) -> dict[str, Any]:
        while not (found := [event for event in self.events if event.get("method") == method]):
            self.events.append(self._receive())
        return found[0]

    def open(self, page: Path | str) -> None:
        """Open a file, or an address."""
        self.events.clear()
        url = page if isinstance(page, str) else page.resolve().as_uri()
        self.call("Page.navigate", url=url)
        self.wait_for("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        how = {"returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", expression=expression, **how)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def resize(self, width: int, height: int, *, is_mobile: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=is_mobile)

    def prefer(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def wait_until(self, expression: str) -> None:
        """Wait until a condition of the page holds."""
        deadline = time.monotonic() + TIMEOUT
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, expression
            time.sleep(0.03)

    def upload(self, selector: str, *paths: Path) -> None:
        """Choose files, as a user does."""
        document = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=document, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])

    def hover(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str, code: int) -> None:
        given = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, **given)

    def screenshot(self, path: Path, *, whole: bool = True) -> bytes:
        options: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {**size, "x": 0, "y": 0, "scale": 1}
        image = base64.b64decode(self.call("Page.captureScreenshot", **options)["data"])
        path.write_bytes(image)
        return image

    def problems(self) -> list[str]:
        """Console errors, broken rules of the content security policy, exceptions."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [json.dumps(event) for event in self.events if event.get("method") in kinds]

    def requested(self) -> list[str]:
        sent = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reader], [], [], deadline - time.monotonic())
            chunk = os.read(self._reader, 1 << 20) if ready else b""
            assert chunk, "the browser gave no answer"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextmanager
def running_browser(executable: str, folder: Path, *more: str) -> Iterator[Browser]:
    """A browser with a fresh profile in ``folder``, gone when the block ends; ``more`` options."""
    to_browser, commands = os.pipe()
    answers, from_browser = os.pipe()
    options = [
        "--headless=new",
        "--no-sandbox",  # needed in containers; the page is our own
        "--remote-debugging-pipe",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--hide-scrollbars",
        f"--user-data-dir={folder}",
        *more,
    ]
    launch = [sys.executable, "-c", LAUNCH, str(to_browser), str(from_browser)]
    command, kept = [*launch, executable, *options], (to_browser, from_browser)
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(command, pass_fds=kept, stdout=log, stderr=log)
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Browser(answers, commands)
    finally:
        os.close(commands)
        os.close(answers)
        process.terminate()
        process.wait(timeout=TIMEOUT)
