"""Connections of difficult clients: pipelining, disconnecting, slow, too many."""
import json
import random
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from conftest import PACED, PATIENCE_S
from raw import Reader, error_of, events, post

# Takes five minutes on a delayed server.
LONG = dict(prompt="x", max_tokens=30000, stream=True, ignore_eos=True)


@pytest.fixture(autouse=True)
def nothing_left(request):
    """After every test: no stream, sequence or block is left, and no connection but the one for metrics."""
    yield
    for name in {"server", "delayed"} & set(request.fixturenames):
        request.getfixturevalue(name).wait_idle()
        request.getfixturevalue(name).wait_metric("http_connections", 1)


def test_one_chunk_an_event_or_more(server):
    with server.connect() as s:
        s.sendall(post("/v1/completions", dict(prompt="x", max_tokens=50, stream=True)))
        r = Reader(s)
        status, headers = r.head()
        assert status == 200 and headers["content-type"].startswith("text/event-stream")
        chunks = list(r.chunks())
    assert all(c.endswith(b"\n\n") for c in chunks)
    payloads = events(b"".join(chunks))
    assert len(payloads) == 51 and payloads[-1] == "[DONE]"
    assert all(len(json.loads(p)["choices"][0]["text"]) == 1 for p in payloads[:-1])


def test_keep_alive_after_a_stream(server):
    with server.connect() as s:
        r = Reader(s)
        for i in range(5):
            s.sendall(post("/v1/completions", dict(prompt="x", max_tokens=5, stream=i % 2 == 0)))
            assert r.answer()[0] == 200


def test_pipelined_streams(server):
    ask = [dict(prompt="x", max_tokens=10 + i, seed=i, stream=i % 3 != 0) for i in range(12)]
    with server.connect() as s:
        s.sendall(b"".join(post("/v1/completions", a) for a in ask))
        r = Reader(s)
        answers = [r.answer() for _ in ask]
    for a, (status, headers, body) in zip(ask, answers):
        assert status == 200
        if a["stream"]:
            assert len(events(body)) == a["max_tokens"] + 1
        else:
            assert json.loads(body)["usage"]["completion_tokens"] == a["max_tokens"]


def test_http_1_0(server):
    with server.connect() as s:
        s.sendall(post("/v1/completions", dict(prompt="x", max_tokens=5, stream=True), version="1.0"))
        status, headers, body = Reader(s).answer()
    assert status == 200 and "transfer-encoding" not in headers
    assert len(events(body)) == 6 and events(body)[-1] == "[DONE]"


def test_connection_close(server):
    with server.connect() as s:
        s.sendall(post("/v1/completions", dict(prompt="x", max_tokens=5, stream=True), "Connection: close"))
        r = Reader(s)
        status, headers, body = r.answer()
        assert status == 200 and len(events(body)) == 6
        assert r.more() == b""


def test_chunked_body(server):
    body = json.dumps(dict(prompt="abc", max_tokens=3)).encode()
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in (body[:5], body[5:6], body[6:])) + b"0\r\n\r\n"
    with server.connect() as s:
        s.sendall(post("/v1/completions", b"", "Transfer-Encoding: chunked", length=False) + chunks)
        status, _, answer = Reader(s).answer()
    assert status == 200 and json.loads(answer)["usage"]["prompt_tokens"] == 3


def test_body_byte_by_byte(server):
    with server.connect() as s:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for b in post("/v1/completions", dict(prompt="x", max_tokens=2)):
            s.sendall(bytes([b]))
        assert Reader(s).answer()[0] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_frees_its_blocks(delayed, stream):
    gone = delayed.metric("clients_gone_total")
    socks = []
    for _ in range(20):
        s = delayed.connect()
        s.sendall(post("/v1/completions", dict(LONG, n=2, stream=stream)))
        socks.append(s)
    delayed.wait_metric("num_requests_running", 40)
    if stream:
        for s in socks:
            assert s.recv(100)
    for s in socks:
        s.close()
    delayed.wait_idle()
    assert delayed.metric("clients_gone_total") == gone + 20


def test_long_lists_of_allowed_ids_stop_nobody(start):
    """The longest list of ids, in more requests than all lists together have room for."""
    server = start("--max-num-seqs", "64", model=PACED)
    body = post("/v1/completions", dict(LONG, allowed_token_ids=[65 + i % 26 for i in range(65536)], stream=True))
    socks = [server.connect() for _ in range(17)]
    for s in socks:
        s.sendall(body)
    server.wait_metric("num_requests_running", 17)
    answer = server.ask("POST", "/v1/completions", json=dict(prompt="x", max_tokens=3))
    assert answer.status_code == 200  # the seventeen would run for five minutes
    for s in socks:
        assert Reader(s).head()[0] == 200
        s.close()
    server.wait_idle()


def test_client_that_resets(delayed):
    gone = delayed.metric("clients_gone_total")
    for _ in range(10):
        s = delayed.connect()
        s.sendall(post("/v1/completions", LONG))
        assert s.recv(100)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.close()
    delayed.wait_idle()
    assert delayed.metric("clients_gone_total") == gone + 10


def test_client_that_leaves_while_waiting(start):
    s = start("--max-num-seqs", "1", model=PACED)
    first = s.connect()
    first.sendall(post("/v1/completions", LONG))
    s.wait_metric("num_requests_running", 1)
    waiting = [s.connect() for _ in range(5)]
    for w in waiting:
        w.sendall(post("/v1/completions", LONG))
    s.wait_metric("num_requests_waiting", 5)
    for w in waiting:
        w.close()
    s.wait_metric("num_requests_waiting", 0)
    s.wait_metric("http_streams", 1)
    assert s.metric("num_requests_running") == 1
    first.close()
    s.wait_idle()


def test_silent_stream_gets_comments(start):
    """A stream in the queue gets keepalive comments, which are not events."""
    s = start("--max-num-seqs", "1", model=PACED)
    with s.connect() as first, s.connect() as waiting:
        first.sendall(post("/v1/completions", LONG))
        s.wait_metric("num_requests_running", 1)
        waiting.sendall(post("/v1/completions", dict(prompt="x", stream=True)))
        r = Reader(waiting)
        assert r.head()[0] == 200
        assert next(r.chunks()) == b": keepalive\n\n"
    s.wait_idle()


def test_half_closed_stream_counts_as_gone(delayed):
    gone = delayed.metric("clients_gone_total")
    with delayed.connect() as s:
        s.sendall(post("/v1/completions", dict(LONG, prompt=["x"] * 500, stream=False)))
        delayed.wait_metric("num_requests_running", 500)
        s.shutdown(socket.SHUT_WR)
        delayed.wait_idle()
    assert delayed.metric("clients_gone_total") == gone + 1


def test_leaving_mid_request(server):
    for data in (b"", b"POST", post("/v1/completions", LONG)[:-5], b"GET /health HTTP/1.1\r\n"):
        s = server.connect()
        s.sendall(data)
        s.close()
    server.wait_metric("http_connections", 1)


def test_half_closed_get(server):
    with server.connect() as s:
        s.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        s.shutdown(socket.SHUT_WR)
        assert Reader(s).answer()[0] == 200


def test_slow_reader_is_cut_off(start):
    s = start()
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect((s.host, s.port))
    slow.sendall(post("/v1/completions", dict(LONG, n=8)))  # 60 MB of events
    s.wait_metric("clients_slow_total", 1)
    s.wait_idle()
    assert s.metric("clients_gone_total") == 0
    slow.settimeout(PATIENCE_S)
    data = b""
    try:
        while piece := slow.recv(1 << 16):
            data = data[-16:] + piece
    except ConnectionResetError:
        pass
    assert not data.endswith(b"0\r\n\r\n"), "an answer that was cut off must not look whole"


def test_slow_reader_that_reads_gets_all(server):
    """Events accumulate while the client sleeps, and none is lost."""
    with server.connect() as s:
        s.sendall(post("/v1/completions", dict(prompt="x", max_tokens=2000, stream=True, seed=1)))
        r = Reader(s)
        r.head()
        body = b""
        for i, chunk in enumerate(r.chunks()):
            body += chunk
            if i < 5:
                time.sleep(0.1)
    assert len(events(body)) == 2001


def test_dawdling_headers_do_not_stop_others(server):
    loris = [server.connect() for _ in range(50)]
    for s in loris:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: ")
    with server.connect() as s:
        s.sendall(post("/v1/completions", dict(prompt="x", max_tokens=5)))
        assert Reader(s).answer()[0] == 200
    server.wait_metric("http_connections", 51)  # none of them was closed for it
    for s in loris:
        s.close()


def test_header_flood(server):
    with server.connect() as s:
        s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        try:
            for i in range(20000):
                s.sendall(b"X-Header-%d: %s\r\n" % (i, b"a" * 50))
            s.sendall(b"\r\n")
            status = Reader(s).answer()[0]
        except (ConnectionError, EOFError):
            status = 431
    assert status in (400, 413, 431)
    assert "ready" in server.get("/health")


@pytest.mark.parametrize("size, expect", [(9 << 20, False), (100 << 20, True)])
def test_body_too_large(server, size, expect):
    with server.connect() as s:
        headers = ["Expect: 100-continue"] if expect else []
        s.sendall(post("/v1/completions", b"", *headers, length=size))
        if not expect:
            s.sendall(b" " * size)
        status, _, body = Reader(s).answer()
    assert status == 413 and "max-body-bytes" in error_of(body)["message"]


def test_endless_chunked_body(start):
    s = start("--max-body-bytes", "1MiB")
    with s.connect() as c:
        c.sendall(post("/v1/completions", b"", "Transfer-Encoding: chunked", length=False))
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        with pytest.raises(ConnectionError):
            for _ in range(10000):
                c.sendall(chunk)
    s.wait_metric("http_connections", 1)


@pytest.mark.parametrize("request_line, status", [
    ("GET /nothing", 404), ("POST /health", 405), ("DELETE /v1/models", 405), ("GET /v1/completions", 405), ("PUT /metrics", 405),
    ("GET /" + "a" * 1000, 404), ("GET /v1/models/", 404), ("GET /health?x=1", 200), ("GET //health", 404),
])
def test_routes_and_methods(server, request_line, status):
    with server.connect() as s:
        s.sendall(f"{request_line} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        got, headers, body = Reader(s).answer()
    assert got == status
    if status == 405:
        assert headers["allow"] in ("GET, HEAD, OPTIONS", "POST, OPTIONS")
    if status != 200:
        assert error_of(body)["code"] == status


def test_content_type(server):
    def ask(content_type):
        with server.connect() as s:
            body = b'{"prompt":"x"}'
            s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%s" % (content_type, len(body), body))
            return Reader(s).answer()[0]

    assert ask(b"Content-Type: text/plain\r\n") == 415
    assert ask(b"Content-Type: application/jsonp\r\n") == 415
    for coding, status in ((b"gzip", 415), (b"br, gzip", 415), (b"x", 415), (b"", 200), (b"identity", 200), (b"Identity", 200)):
        assert ask(b"Content-Type: application/json\r\nContent-Encoding: " + coding + b"\r\n") == status, coding
    assert ask(b"Content-Type: Application/JSON; charset=utf-8\r\n") == 200
    assert ask(b"") == 200


def test_garbage(server):
    for data in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"\r\n" * 1000, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", bytes(range(256)) * 10):
        with server.connect(timeout=2) as s:
            s.sendall(data)
            try:
                s.shutdown(socket.SHUT_WR)
                while s.recv(1000):
                    pass
            except (ConnectionError, TimeoutError, OSError):
                pass
    assert "ready" in server.get("/health")


def test_queue_full(start):
    s = start("--max-num-seqs", "1", "--max-queue", "40", model=PACED)
    with s.connect() as running, s.connect() as c:
        running.sendall(post("/v1/completions", dict(LONG, prompt=["x"] * 40)))
        s.wait_metric("num_requests_running", 1)
        c.sendall(post("/v1/completions", dict(prompt=["x"] * 39)))
        status, headers, body = Reader(c).answer()
        assert status == 429 and int(headers["retry-after"]) >= 1
        assert error_of(body)["type"] == "rate_limit_error"
    s.wait_idle()


def test_queue_timeout(start):
    """A request that waits too long is refused, in its own response format."""
    # Long enough for the request that runs to begin on a loaded machine.
    s = start("--max-num-seqs", "1", "--queue-timeout", "3", model=PACED)
    with s.connect() as running, s.connect() as waiting, s.connect() as stream:
        running.sendall(post("/v1/completions", LONG))
        s.wait_metric("num_requests_running", 1)
        waiting.sendall(post("/v1/completions", dict(prompt="x")))
        stream.sendall(post("/v1/completions", dict(prompt="x", stream=True)))
        status, headers, body = Reader(waiting).answer()
        assert status == 503 and headers["retry-after"] and "queue" in error_of(body)["message"]
        payloads = events(Reader(stream).answer()[2])
        assert payloads[-1] == "[DONE]" and json.loads(payloads[-2])["error"]["code"] == 503
        assert s.metric("num_requests_running") == 1
    s.wait_idle()


def test_request_timeout(start):
    """A request that runs too long is ended."""
    s = start("--request-timeout", "2", model=PACED)
    with s.connect() as c:
        c.sendall(post("/v1/completions", dict(LONG, stream=False)))
        status, _, body = Reader(c).answer()
    choice = json.loads(body)["choices"][0]
    assert status == 200 and choice["finish_reason"] == "abort" and 0 < len(choice["text"]) <= 30000 / 10
    s.wait_idle()


def test_many_clients_come_and_go(server):
    """Random streams, answers and disconnects; everything is released."""

    def one(seed):
        rng = random.Random(seed)
        for _ in range(15):
            with server.connect() as s:
                s.sendall(post("/v1/completions", dict(prompt="x", max_tokens=rng.choice([1, 20, 3000]), n=rng.choice([1, 3]),
                                                       stream=rng.random() < 0.7)))
                if rng.random() < 0.5:
                    s.settimeout(rng.random() * 0.02 + 0.001)
                    try:
                        s.recv(1000)
                    except OSError:
                        pass
                else:
                    assert Reader(s).answer()[0] == 200

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(16)))
