"""A headless chromium, driven through the DevTools protocol over a pipe."""
import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

from conftest import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find():
    """The browser's path, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab. Errors of the page are collected in `complaints`."""

    def __init__(self):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self.to = os.pipe()
        self.back, back_write = os.pipe()
        command = [find(), "--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage",
                   "--no-first-run", "--disable-background-networking", "--disable-extensions", "--no-sandbox",
                   "--force-color-profile=srgb", "--hide-scrollbars", f"--user-data-dir={self.profile.name}", "about:blank"]

        def pipes():  # chromium reads commands from descriptor 3 and answers on 4
            a, b = os.dup(to_read), os.dup(back_write)
            os.dup2(a, 3)
            os.dup2(b, 4)

        self.process = subprocess.Popen(command, close_fds=False, preexec_fn=pipes, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(back_write)
        self.buffer, self.last_id, self.session = b"", 0, None
        self.complaints = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(domain + ".enable")

    def message(self, seconds):
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.back], [], [], seconds)
            data = os.read(self.back, 1 << 16) if ready else b""
            assert data, "the browser does not answer"
            self.buffer += data
        text, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, **params):
        self.last_id += 1
        command = {"id": self.last_id, "method": method, "params": params}
        if self.session:
            command["sessionId"] = self.session
        os.write(self.to, json.dumps(command).encode() + b"\0")
        while True:
            m = self.message(PATIENCE_S)
            if m.get("id") == self.last_id:
                assert "error" not in m, (method, m["error"])
                return m["result"]
            if m.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(m["params"]["exceptionDetails"])
            elif m.get("method") == "Log.entryAdded" and m["params"]["entry"]["level"] == "error":
                self.complaints.append(m["params"]["entry"]["text"])

    def size(self, width, height, scale=1, dark=False, phone=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone)
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def open(self, url):
        self.call("Page.navigate", url=url)

    def js(self, expression):
        """Evaluate a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression, seconds=PATIENCE_S):
        """Wait until the expression is true."""
        end = time.monotonic() + seconds
        while not (value := self.js(f"document.readyState !== 'loading' && ({expression})")):
            assert time.monotonic() < end, (expression, self.complaints, self.js("document.body.innerText"))
            time.sleep(0.05)
        return value

    def type(self, text):
        self.call("Input.insertText", text=text)

    def key(self, name, modifiers=0):
        code, text = {"Enter": (13, {"text": "\r"}), "Tab": (9, {})}.get(name, (0, {}))
        for kind, more in (("keyDown", text), ("keyUp", {})):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code,
                      modifiers=modifiers, **more)

    def picture(self, path, whole=False):
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        with open(path, "wb") as f:
            f.write(base64.b64decode(data))

    def close(self):
        os.close(self.to)
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.back)
        self.profile.cleanup()
