"""A headless Chromium, driven over a pipe by the DevTools protocol: enough to open a page and use it."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# No sandbox: tests run as root in containers. No connections of the browser's own.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
)  # fmt: skip


class Page:
    """One tab. `problems` are its console errors and uncaught exceptions."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._left = b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []

    def open(self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=path.as_uri())
        while self.run("document.readyState") != "complete" or self.run("location.href") == "about:blank":
            time.sleep(0.02)
        self.frames()

    def run(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression, awaited if it is a promise."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def frames(self) -> None:
        """Waits until the page is drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.frames()

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        for kind, (x, y) in (("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.frames()

    def wheel(self, x: float, y: float, amount: float) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=amount)
        self.frames()

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)
        self.frames()

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, text="\r" if key == "Enter" else "")
        self.frames()

    def screenshot(self) -> bytes:
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"])
        elif event.get("method") == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            self.problems.append(str(parameters["args"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            piece = os.read(self._read, 1 << 16)
            assert piece, "the browser has gone"
            self._left += piece
        message, _, self._left = self._left.partition(b"\0")
        received: dict[str, Any] = json.loads(message)
        return received


@contextmanager
def browser() -> Iterator[Page]:
    """Starts a Chromium with a new profile; ends it and removes the profile afterwards."""
    assert PROGRAM is not None, "no Chromium is installed"
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()

    def connect() -> None:  # the protocol's ends are descriptors 3 and 4
        keep = [os.dup(to_browser), os.dup(from_browser)]
        os.dup2(keep[0], 3)
        os.dup2(keep[1], 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [PROGRAM, *FLAGS, f"--user-data-dir={profile}"],
            preexec_fn=connect,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        page = Page(read, write)
        try:
            yield page
        finally:
            process.terminate()
            process.wait()
            os.close(read)
            os.close(write)
