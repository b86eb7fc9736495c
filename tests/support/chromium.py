"""A headless Chromium, driven through its pipe without a driver (the DevTools protocol: JSON
between zero bytes)."""

import base64
import json
import os
import pathlib
import select
import shutil
import subprocess
import tempfile
import time

PROGRAM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


class Browser:
    """A context: one page of a browser that can reach no other machine."""

    def __init__(self, *, width: int = 1000, height: int = 800):
        self._size, self._number, self._rest = (width, height), 0, b""

    def __enter__(self) -> "Browser":
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        command = [
            PROGRAM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--mute-audio",
            "--no-first-run",
            "--disable-dev-shm-usage",
            "--autoplay-policy=no-user-gesture-required",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._folder.name}",
            f"--window-size={self._size[0]},{self._size[1]}",
            "--disable-background-networking",
            "--proxy-server=127.0.0.1:9",
            "--proxy-bypass-list=127.0.0.1",
        ]
        # The browser reads descriptor 3 and writes 4.
        script = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "chromium", *command],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        width, height = self._size
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)
        self._folder.cleanup()

    def call(self, method: str, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + 60
        while time.monotonic() < until:
            line, zero, rest = self._rest.partition(b"\0")
            if not zero:
                if select.select([self._from], [], [], 1)[0]:
                    part = os.read(self._from, 1 << 20)
                    assert part, "the browser ended"
                    self._rest += part
                continue
            self._rest = rest
            found = json.loads(line)
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]
        raise TimeoutError(method)

    def value(self, expression: str):
        """The value of an expression in the page."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 20):
        """Waits until an expression is true in the page. Returns its value."""
        end = time.monotonic() + seconds
        while True:
            try:
                if value := self.value(expression):
                    return value
            except AssertionError:  # while one page replaces another
                pass
            assert time.monotonic() < end, expression
            time.sleep(0.02)

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def press(self, key: str) -> None:
        """Presses a key, as a person does."""
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        code = {"Enter": 13, "ArrowLeft": 37, "ArrowRight": 39}.get(key, ord(key[0].upper()))
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: pathlib.Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
