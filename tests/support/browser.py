"""Chromium without a window, spoken to over its debugging pipe: JSON messages that end with a zero byte."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
SECONDS = 30.0


class Page:
    """One tab, and what it has asked for and complained about since it was opened."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, os.fdopen(read, "rb")
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command. Raises RuntimeError when Chromium refuses it."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives, awaited."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        return str(self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def wait_for(self, expression: str) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + SECONDS
        while not self.value(expression):
            assert time.monotonic() < deadline, f"{expression}\n{self.complaints}\n{self.text('body')}"
            time.sleep(0.1)

    def press(self, key: str, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, **({"text": text} if text and kind == "keyDown" else {})
            )

    def type(self, selector: str, text: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        self.send("Input.insertText", text=text)

    def picture(self, width: int) -> bytes:
        """A PNG of the whole page, as a window of that width shows it."""
        for _ in range(2):  # so high that nothing is left to scroll
            height = self.value("document.documentElement.scrollHeight")
            self.send(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
            )
            self.value("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn))), 0")
        return base64.b64decode(self.send("Page.captureScreenshot")["data"])

    def close(self) -> None:
        os.close(self._write)  # which ends Chromium
        self._read.close()

    def _next(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._read.read(1)) != b"\0":
            assert byte, "Chromium has ended"
            data += byte
        return dict(json.loads(data))

    def _note(self, event: dict[str, Any]) -> None:
        match event:
            case {"method": "Network.requestWillBeSent", "params": {"request": {"url": url}}}:
                self.requests.append(url)
            case {"method": "Log.entryAdded", "params": {"entry": {"level": "error" | "warning", **entry}}}:
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}")
            case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                self.complaints.append(str(details))
            case {"method": "Runtime.consoleAPICalled", "params": {"type": "error" | "warning", **call}}:
                self.complaints.append(str(call))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A tab of a fresh Chromium, for as long as the block lasts."""
    commands, answers = os.pipe(), os.pipe()
    flags = ["--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--hide-scrollbars",
             "--disable-dev-shm-usage", "--window-size=1280,900", f"--user-data-dir={profile}",
             *(["--no-sandbox"] if os.geteuid() == 0 else [])]  # fmt: skip
    process = subprocess.Popen(
        # It reads commands from descriptor 3 and writes to 4.
        ["bash", "-c", f'exec "$0" "$@" 3<&{commands[0]} 4>&{answers[1]}', str(CHROMIUM), *flags],
        pass_fds=(commands[0], answers[1]),
        stderr=subprocess.DEVNULL,
    )
    os.close(commands[0])
    os.close(answers[1])
    page = Page(commands[1], answers[0])
    try:
        yield page
    finally:
        page.close()
        process.wait(SECONDS)
