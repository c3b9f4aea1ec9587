"""deploy/nginx/quire.conf in operation: equal prefixes go to the same replica, streams are not buffered, a dead replica is skipped."""
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from conftest import ROOT

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="needs nginx (apt-get install nginx-light)")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Proxy:
    """nginx with the example configuration, except for the ports, in front of two replicas."""

    def __init__(self, folder, replicas):
        self.port = free_port()
        with open(os.path.join(ROOT, "deploy", "nginx", "quire.conf")) as f:
            text = f.read()
        for example, port in (("127.0.0.1:8001", replicas[0].port), ("127.0.0.1:8002", replicas[1].port)):
            assert example in text
            text = text.replace(example, f"127.0.0.1:{port}")
        assert "listen 8000;" in text
        text = text.replace("listen 8000;", f"listen 127.0.0.1:{self.port};")
        paths = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        with open(os.path.join(folder, "nginx.conf"), "w") as f:
            f.write(f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log info; events {{}}\n"
                    f"http {{ access_log off; {paths}\n{text}\n}}\n")
        self.process = subprocess.Popen([NGINX, "-e", f"{folder}/error.log", "-c", f"{folder}/nginx.conf"])
        end = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < end, open(f"{folder}/error.log").read()
                time.sleep(0.02)

    def post(self, body, **headers):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json", **headers})
        return urllib.request.urlopen(request, timeout=60)

    def complete(self, prompt, **headers):
        with self.post({"prompt": prompt, "max_tokens": 2}, **headers) as answer:
            return json.load(answer)["choices"][0]["finish_reason"]


@pytest.fixture
def proxied(start, tmp_path):
    """Start a proxy in front of two replicas of a model."""
    made = []

    def begin(model):
        replicas = [start(model=model), start(model=model)]
        made.append(Proxy(str(tmp_path), replicas))
        return made[-1], replicas

    yield begin
    for proxy in made:
        proxy.process.terminate()
        proxy.process.wait(20)


def share(replicas, n, send):
    """Run `send`, which sends n requests; returns the number that each replica has answered, in ascending order."""
    def served():
        return [r.metric("http_requests_total", route="/v1/completions") for r in replicas]
    before = served()
    send()
    end = time.monotonic() + 30
    while sum(now := served()) < sum(before) + n:  # counted after the response was sent, which may be after it was read
        assert time.monotonic() < end
        time.sleep(0.02)
    return sorted(b - a for a, b in zip(before, now))


def test_equal_beginnings_share_a_replica(proxied):
    proxy, replicas = proxied("null")

    def send(prompts, **headers):
        return share(replicas, len(prompts), lambda: [proxy.complete(p, **headers) for p in prompts])

    for document in ("a" * 300, "b" * 300, "c" * 300):
        assert send([f"{document} question {i}" for i in range(4)]) == [0, 4]
    own = [f"{i} begins in its own way" for i in range(40)]
    assert send(own)[0] > 0, "one replica gets everything"
    assert send(own[:6], **{"X-Quire-Affinity": "tenant"}) == [0, 6]


def test_events_arrive_while_the_stream_runs(proxied):
    proxy, replicas = proxied("null:300000")
    with proxy.post({"prompt": "a", "max_tokens": 1000, "stream": True, "ignore_eos": True}) as answer:
        assert answer.readline().startswith(b"data: ")
        # A token takes 0.3 s: it runs for five minutes.
        assert sum(r.metric("http_streams") for r in replicas) == 1
    for r in replicas:
        r.wait_idle()  # the client has left


def test_requests_go_on_when_a_replica_is_killed(proxied):
    proxy, replicas = proxied("null")
    prompts = [f"{i} begins in its own way" for i in range(20)]
    assert share(replicas, len(prompts), lambda: [proxy.complete(p) for p in prompts])[0] > 0
    replicas[0].process.send_signal(signal.SIGKILL)
    replicas[0].process.wait()
    for prompt in prompts:
        assert proxy.complete(prompt) == "length"
