"""Drive a page in Chromium by its debugging protocol, over a pipe. Needs no library and no network."""

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# The profile is new: no first run, nothing fetched or sent.
FLAGS = ["headless", "no-sandbox", "disable-gpu", "remote-debugging-pipe", "no-first-run", "disable-sync"]
FLAGS += ["disable-background-networking", "disable-component-update"]
SECONDS = 60  # for an answer


class Chromium:
    """A headless Chromium with one tab, whose profile and downloads are below `folder`."""

    def __init__(self, folder: Path):
        assert CHROMIUM is not None, "the test skips without it"
        (read, self.into), (self.out, write) = os.pipe(), os.pipe()
        # Chromium reads from 3 and writes to 4.
        shell = ["sh", "-c", f'exec "$@" 3</dev/fd/{read} 4>/dev/fd/{write}', "sh", CHROMIUM]
        options = [*(f"--{flag}" for flag in FLAGS), f"--user-data-dir={folder / 'profile'}", "about:blank"]
        with open(folder / "chromium.log", "wb") as log:
            self.process = subprocess.Popen([*shell, *options], pass_fds=(read, write), stderr=log)
        os.close(read)
        os.close(write)
        self.session, self.sent, self.rest = "", 0, b""
        tabs = self.ask("Target.getTargets")["targetInfos"]
        tab = next(each["targetId"] for each in tabs if each["type"] == "page")
        self.session = self.ask("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        self.ask("Page.enable")
        self.downloads = folder / "downloads"
        self.ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *_) -> None:
        self.process.terminate()
        self.process.wait()
        os.close(self.into)
        os.close(self.out)

    def ask(self, method: str, **parameters) -> dict[str, Any]:
        """Return the result of a method of the protocol."""
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.into, json.dumps(message).encode() + b"\0")
        return self._await("id", self.sent)["result"]

    def _await(self, key: str, value: Any) -> dict[str, Any]:
        """Return the next message with this value."""
        while True:
            while b"\0" not in self.rest:
                ready, _, _ = select.select([self.out], [], [], SECONDS)
                assert ready, f"Chromium has not answered within {SECONDS} seconds: see chromium.log"
                new = os.read(self.out, 1 << 20)
                assert new, "Chromium has ended: see chromium.log"
                self.rest += new
            line, self.rest = self.rest.split(b"\0", 1)
            message = json.loads(line)
            if message.get(key) == value:
                assert "error" not in message, message
                return message

    def open(self, page: Path) -> None:
        self.ask("Page.navigate", url=page.absolute().as_uri())
        self._await("method", "Page.loadEventFired")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str, times: int = 1) -> None:
        """Press and release a key, as a person does; held down, it comes several `times`."""
        typed = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        for i in range(times):
            self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, autoRepeat=i > 0, **typed)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key)

    def download(self, name: str) -> str:
        """Return the content of a download once it is complete."""
        end = time.monotonic() + SECONDS
        while not (self.downloads / name).exists():
            assert time.monotonic() < end, f"no download {name}"
            time.sleep(0.05)
        return (self.downloads / name).read_text()

    def window(self, width: int, height: int = 800, *, dark: bool = False) -> None:
        """Set the size of the window and the color scheme; a narrow one is a phone's."""
        phone = {"mobile": width < 600, "deviceScaleFactor": 1}
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, **phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
