"""Bodies that take long to be parsed: workers do that, not the threads that read and answer all connections."""
import contextlib
import glob
import json
import os
import signal
import ssl

import pytest

from conftest import PATIENCE_S, ROOT, Server
from raw import Reader, error_of, events, post
from test_keys import make_certificate

DEMO = os.path.join(ROOT, "models", "demo")
LONG = "a" * 1_000_000  # one word: slow to encode


@pytest.fixture(scope="module")
def demo():
    s = Server("--device", "cpu", "--kv-cache-memory", "16MiB", "--http-threads", "1", model=DEMO)
    yield s
    s.wait_idle()
    assert s.stop() == 0, s.log


def ticks(server, name):
    """The processor time of the threads of this name."""
    total = 0
    for path in glob.glob(f"/proc/{server.process.pid}/task/*/stat"):
        try:
            with open(path, encoding="utf-8") as f:
                head, rest = f.read().rsplit(")", 1)
        except (FileNotFoundError, ProcessLookupError):  # a thread that ended after it was listed
            continue
        if head.split("(", 1)[1] == name:
            fields = rest.split()
            total += int(fields[11]) + int(fields[12])
    return total


def test_a_worker_encodes_them(demo):
    before = ticks(demo, "quire-http"), ticks(demo, "quire-worker")
    while ticks(demo, "quire-worker") - before[1] < 50:
        answer = demo.ask("POST", "/tokenize", json={"prompt": LONG})
        assert answer.status_code == 200 and answer.json()["count"] >= len(LONG)
        assert ticks(demo, "quire-http") - before[0] < 500, "the thread of all connections does the work"
    assert ticks(demo, "quire-http") - before[0] < ticks(demo, "quire-worker") - before[1]


def test_answers_are_as_those_of_short_bodies(demo):
    """Whole, streamed, refused; each behind another one on its connection."""
    fields = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0}
    padding = " " * 100_000
    with demo.connect() as s:
        r = Reader(s)
        s.sendall(post("/v1/completions", fields))
        short = json.loads(r.answer()[2])
        for _ in range(2):
            s.sendall(post("/v1/completions", (json.dumps(fields) + padding).encode()))
            status, _, body = r.answer()
            assert status == 200 and json.loads(body)["choices"] == short["choices"]
        s.sendall(post("/v1/completions", (json.dumps(fields | {"max_tokens": "x"}) + padding).encode()))
        assert r.answer()[0] == 400
        s.sendall(post("/v1/completions", (json.dumps(fields | {"stream": True}) + padding).encode()))
        status, headers, body = r.answer()
        assert status == 200 and headers["content-type"].startswith("text/event-stream")
        assert "".join(json.loads(e)["choices"][0]["text"] for e in events(body)[:-1]) == short["choices"][0]["text"]


def test_clients_that_leave_are_forgotten(demo):
    for path, fields in (("/tokenize", {"prompt": LONG}), ("/v1/completions", {"prompt": LONG, "max_tokens": 500, "truncate_prompt_tokens": 5}),
                         ("/v1/completions", {"prompt": LONG, "max_tokens": 500, "truncate_prompt_tokens": 5, "stream": True})):
        for _ in range(3):
            with demo.connect() as s:
                s.sendall(post(path, fields))
    assert demo.ask("POST", "/tokenize", json={"prompt": "x" + " " * 50_000}).status_code == 200
    demo.wait_idle()


def test_a_shutdown_waits_for_them(start):
    s = start("--device", "cpu", "--kv-cache-memory", "16MiB", "--http-threads", "1", "--shutdown-timeout", "1000", model=DEMO)
    with s.connect() as c:
        c.sendall(post("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 5, "max_tokens": 1}))
        while ticks(s, "quire-worker") == 0:
            pass
        s.process.send_signal(signal.SIGTERM)
        assert Reader(c).answer()[0] in (200, 503)  # whether it was read before the signal
    assert s.process.wait(PATIENCE_S) == 0, s.log


def test_a_shutdown_that_is_over_time_refuses_what_waits(start):
    """Encoding all of them takes longer than the server waits for streams that it has ended."""
    s = start("--device", "cpu", "--kv-cache-memory", "16MiB", "--http-threads", "1", "--shutdown-timeout", "0", model=DEMO)
    clients = [s.connect() for _ in range(250)]
    for c in clients:
        c.sendall(post("/tokenize", {"prompt": "a" * 200_000}))
    while s.metric("client_buffer_bytes") < 100 * 200_000:
        pass
    s.process.send_signal(signal.SIGTERM)
    answers = []
    for c in clients:
        with c, contextlib.suppress(EOFError):  # whose body was not read yet
            answers.append(Reader(c).answer())
    assert s.process.wait(PATIENCE_S) == 0, s.log
    refused = [error_of(body)["message"] for status, _, body in answers if status == 503]
    assert refused and all("shutting down" in message for message in refused)
    assert {status for status, _, _ in answers} <= {200, 503}


def test_with_tls(tmp_path, start):
    cert, key = make_certificate(tmp_path, "a")
    s = start("--ssl-certfile", cert, "--ssl-keyfile", key)
    context = ssl._create_unverified_context()
    with context.wrap_socket(s.connect()) as c:
        r = Reader(c)
        for _ in range(3):
            c.sendall(post("/v1/completions", (json.dumps({"prompt": "x", "max_tokens": 3}) + " " * 100_000).encode()))
            assert r.answer()[0] == 200
