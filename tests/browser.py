"""A page in headless Chromium, spoken to over two pipes: what it logs, asks for, measures and shows."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# Chromium reads commands from descriptor 3 and writes to 4, whatever the pipes were given here
LAUNCH = (
    "import os, sys; r, w = (os.dup(os.dup(int(fd))) for fd in sys.argv[1:3]); os.dup2(r, 3); os.dup2(w, 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)
SECONDS = 60.0  # for one answer, on a busy machine
# the least contrast of a text and what it stands on, by WCAG's formula, and the least letters
LEGIBLE = """(() => {
  const numbers = colour => colour.match(/[0-9.]+/g).map(Number);
  const light = colour => numbers(colour).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const paper = element => {
    while (element && numbers(getComputedStyle(element).backgroundColor)[3] === 0) element = element.parentElement;
    return getComputedStyle(element).backgroundColor;
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let contrast = 21, size = 100;
  while (texts.nextNode()) {
    if (!texts.currentNode.data.trim()) continue;
    const element = texts.currentNode.parentElement, style = getComputedStyle(element);
    const [low, high] = [light(style.color), light(paper(element))].sort((a, b) => a - b);
    contrast = Math.min(contrast, (high + 0.05) / (low + 0.05));
    size = Math.min(size, parseFloat(style.fontSize));
  }
  return [contrast, size];
})()"""


class Pipes:
    """Chromium's debugging protocol: JSON and a NUL, in both directions."""

    def __init__(self, to: int, answers: int) -> None:
        self.to, self.answers, self.rest, self.number = to, answers, b"", 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: object) -> dict[str, Any]:
        """The answer to one command; events that come before it are kept."""
        self.number += 1
        command = {"id": self.number, "method": method, "params": parameters}
        message = json.dumps(command | ({"sessionId": session} if session else {})).encode() + b"\0"
        while message:
            message = message[os.write(self.to, message) :]
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self.events.append(answer)

    def wait(self, method: str, session: str) -> None:
        """Until an event has come, which may be one that was kept."""
        while not any(event.get("sessionId") == session and event["method"] == method for event in self.events):
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.answers], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium said nothing for {SECONDS:g} seconds"
            read = os.read(self.answers, 1 << 20)
            assert read, "Chromium has ended"
            self.rest += read
        message, _, self.rest = self.rest.partition(b"\0")
        return dict(json.loads(message))


@dataclass
class Page:
    """One page as a reader with a screen of some width and a scheme of colours has it, without a network."""

    pipes: Pipes
    session: str
    width: int
    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        return self.pipes.call(method, self.session, **parameters)

    def evaluate(self, script: str) -> Any:
        """The value of an expression, or of the promise that it is."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def shot(self, selector: str) -> bytes:
        """A PNG of an element, or of the part of it that the screen has room for."""
        place = f"document.querySelector({json.dumps(selector)})"
        box = self.evaluate(
            f"{place}.scrollIntoView(), (({{x, y, width, height}}) => ({{x: x + scrollX, y: y + scrollY, width, "
            f"height: Math.min(height, innerHeight - y)}}))({place}.getBoundingClientRect())"
        )
        answer = self.call("Page.captureScreenshot", format="png", clip=box | {"scale": 1}, optimizeForSpeed=True)
        return b64decode(answer["data"])


class Browser:
    """One Chromium, for any number of pages."""

    def __init__(self, pipes: Pipes) -> None:
        self.pipes = pipes

    def open(self, path: Path, width: int, scheme: str, height: int = 900) -> Page:
        """The page when all that it holds is loaded, with what it said and what it asked for until then."""
        target = self.pipes.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.pipes.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self.pipes, session, width)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        phone = dict(width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        page.call("Emulation.setDeviceMetricsOverride", **phone)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        page.call("Emulation.setEmulatedMedia", features=[feature])
        self.pipes.events.clear()
        page.call("Page.navigate", url=path.resolve().as_uri())
        self.pipes.wait("Page.loadEventFired", session)
        page.evaluate("Promise.allSettled([...document.images].map(image => image.decode()))")
        page.requests, page.messages = list(_requests(self.pipes.events)), list(_messages(self.pipes.events))
        return page


def _requests(events: Sequence[dict[str, Any]]) -> Iterator[str]:
    for event in events:
        if event["method"] == "Network.requestWillBeSent":
            yield event["params"]["request"]["url"]


def _messages(events: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What a console would show: whatever a script or the browser itself says."""
    for event in events:
        if event["method"] == "Log.entryAdded":
            yield "{level}: {text}".format(**event["params"]["entry"])
        elif event["method"] == "Runtime.exceptionThrown":
            yield f"error: {event['params']['exceptionDetails']['text']}"
        elif event["method"] == "Runtime.consoleAPICalled":
            yield f"{event['params']['type']}: {event['params']['args']}"


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A Chromium of its own, with an empty profile, that ends with the block."""
    assert CHROMIUM is not None
    (theirs, to), (answers, back) = os.pipe(), os.pipe()
    launch = [sys.executable, "-c", LAUNCH, str(theirs), str(back), CHROMIUM]
    with (profile.parent / f"{profile.name}.log").open("wb") as log:
        process = subprocess.Popen(
            [*launch, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs, back),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    os.close(theirs)
    os.close(back)
    pipes = Pipes(to, answers)
    try:
        yield Browser(pipes)
        pipes.call("Browser.close")
        process.wait(SECONDS)
    finally:
        os.close(to)
        os.close(answers)
        if process.poll() is None:
            process.kill()
            process.wait()
