"""Ambiguous and endless requests: each is refused, and nothing after it on its connection is read as a request. And the limits on
connections.

One row per request: its name, its bytes, the status. Each is followed by a second request in the same bytes, which must never
be answered: to a server that mistakes the end of the first one it would be smuggled.
"""
import contextlib
import json
import re
import socket
import ssl
import time

import pytest

from conftest import PATIENCE_S
from raw import Reader, error_of, post
from test_keys import make_certificate

SMUGGLED = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


def wait_taken(s):
    """Until the server has noticed that connections were closed, and takes others."""
    end = time.monotonic() + PATIENCE_S
    while s.ask("GET", "/metrics").status_code == 503:
        assert time.monotonic() < end
        time.sleep(0.01)


def request(*lines, body=b"", host=b"Host: x", line=b"POST /v1/completions HTTP/1.1"):
    """A request with exactly these header lines."""
    head = [line] + ([host] if host else []) + list(lines)
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def chunked(body, *lines):
    return request(b"Transfer-Encoding: chunked", *lines, body=body)


GOOD = b"1\r\n{\r\n"  # a chunk

FRAMING = [
    # two lengths
    ("Content-Length and Transfer-Encoding", request(b"Content-Length: 4", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"), 400),
    ("Transfer-Encoding and Content-Length", request(b"Transfer-Encoding: chunked", b"Content-Length: 4", body=b"0\r\n\r\n"), 400),
    ("a bad length beside Transfer-Encoding", request(b"Transfer-Encoding: chunked", b"Content-Length: +5", body=b"0\r\n\r\n"), 400),
    ("two different Content-Lengths", request(b"Content-Length: 0", b"Content-Length: 35"), 400),
    ("two equal Content-Lengths", request(b"Content-Length: 0", b"content-length: 0"), 400),
    ("a second Content-Length that is none", request(b"Content-Length: 0", b"Content-Length: +5"), 400),
    ("Content-Length on HTTP/1.0 twice", request(b"Content-Length: 0", b"Content-Length: 1", line=b"POST / HTTP/1.0"), 400),
    # transfer codings
    *((f"Transfer-Encoding {value!r}", request(b"Transfer-Encoding: " + value, body=b"0\r\n\r\n"), status) for value, status in (
        (b"xchunked", 501), (b"gzip", 501), (b"identity", 501), (b"gzip, chunked", 501), (b"chunked, identity", 501),
        (b"identity, chunked", 501), (b"chunked, chunked", 400), (b"chunked,", 400), (b",chunked", 400), (b"", 400), (b",", 400),
        (b"chunked ", 400), (b"chunked\t", 400), (b"\tidentity", 501),
        (b"\x0bchunked", 400), (b"chunked\x0b", 400), (b"\x0cchunked", 400), (b"chunked\x00", 400), (b"\"chunked\"", 400),
        (b"chunked;q=1", 400), (b"chun ked", 400), (b"chunked\r\n\tx", 400), (b"\xa0chunked", 400), (b"chunked chunked", 400))),
    ("two Transfer-Encodings", request(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity", body=b"0\r\n\r\n"), 501),
    ("two times chunked", request(b"Transfer-Encoding: chunked", b"transfer-encoding: chunked", body=b"0\r\n\r\n"), 400),
    ("an extension of 200 KB", chunked(b"1;" + b"a" * 200_000 + b"\r\n{\r\n0\r\n\r\n"), 400),
    ("an extension of 2 MB after a chunk", chunked(GOOD + b"1;" + b"a" * 2_000_000 + b"\r\n}\r\n0\r\n\r\n"), 400),
    ("an extension without end", chunked(GOOD + b"1;" + b"a" * 70_000), 400),
    ("an extension of the last chunk", chunked(GOOD + b"0;" + b"a" * 200_000 + b"\r\n\r\n"), 400),
    ("Transfer-Encoding of HTTP/1.0", request(b"Transfer-Encoding: chunked", body=b"0\r\n\r\n", line=b"POST / HTTP/1.0"), 400),
    # names of fields
    ("a space before the colon", request(b"Transfer-Encoding : chunked", body=b"0\r\n\r\n"), 400),
    ("a tab before the colon", request(b"Transfer-Encoding\t: chunked", body=b"0\r\n\r\n"), 400),
    ("a vertical tab before the colon", request(b"Transfer-Encoding\x0b: chunked", body=b"0\r\n\r\n"), 400),
    ("a space before a length's colon", request(b"Content-Length : 35"), 400),
    ("a space in a name", request(b"X Y: 1"), 400),
    ("a name above ASCII", request(b"X\xff: 1"), 400),
    ("no name", request(b": 1"), 400),
    # folded lines
    ("a folded header", request(b"X-A: 1", b" Transfer-Encoding: chunked", body=b"0\r\n\r\n"), 400),
    ("a header folded between two", request(b"X-A: 1", b" b", b"X-C: 2"), 400),
    ("a header folded twice", request(b"X-A: 1", b" b", b"\tc", b"X-C: 2"), 400),
    ("a header folded to nothing", request(b"X-A: 1", b" ", b"X-C: 2"), 400),
    ("an empty header folded to nothing", request(b"A:", b" "), 400),
    ("a folded length", request(b"Content-Length: 0", b" 5"), 400),
    ("a fold by a tab", request(b"X-A: 1", b"\tb"), 400),
    ("a first header with a space before it", request(b" Host: x", host=None), 400),
    ("a CR in a value", request(b"X-A: 1\rTransfer-Encoding: chunked", body=b"0\r\n\r\n"), 400),
    ("a CR before the end of a line", request(b"X-A: 1\r"), 400),
    ("a NUL that ends the head", request(b"\x00", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"), 400),
    ("a line that begins with a NUL", request(b"\x00Transfer-Encoding: chunked", body=b"0\r\n\r\n"), 400),
    # values
    *((f"byte {byte} in a value", request(b"X-A: a" + bytes([byte]) + b"b"), 400) for byte in (0, 1, 8, 11, 12, 14, 27, 31, 127)),
    *((f"byte {byte} at the end of a value", request(b"X-A: a" + bytes([byte])), 400) for byte in (0, 1, 11, 13)),
    *((f"byte {byte} before a value", request(b"X-A: " + bytes([byte]) + b"a", b"X-B: b"), 400) for byte in (0, 1, 11)),
    # hosts
    ("no Host", request(host=None), 400),
    ("two Hosts", request(b"Host: y"), 400),
    ("two equal Hosts", request(b"Host: x"), 400),
    *((f"Host {value!r}", request(host=b"Host: " + value), 400) for value in (b"a b", b"a/b", b"a@b", b"a?b", b"a#b", b"a\\b", b"\xff")),
    # request lines
    *((f"request line {line!r}", line + b"\r\nHost: x\r\n\r\n", status) for line, status in (
        (b"GET  /version HTTP/1.1", 400), (b"GET /version  HTTP/1.1", 400), (b"GET /a b HTTP/1.1", 400),
        (b"G\x00ET /version HTTP/1.1", 400), (b"GET /version\x00 HTTP/1.1", 400), (b"GET /\x01 HTTP/1.1", 400), (b"GET /\xc3\xa9 HTTP/1.1", 400),
        (b"GET /version#a HTTP/1.1", 400), (b"GET version HTTP/1.1", 400), (b"CONNECT x:80 HTTP/1.1", 400),
        (b"GET ftp://x/version HTTP/1.1", 400), (b"(GET) / HTTP/1.1", 400),
        (b"GET /%00 HTTP/1.1", 400), (b"GET /version%0d%0a HTTP/1.1", 400), (b"GET /%7f HTTP/1.1", 400), (b"GET /% HTTP/1.1", 400),
        (b"GET /%2 HTTP/1.1", 400), (b"GET /%zz HTTP/1.1", 400), (b"GET /%u0041 HTTP/1.1", 400), (b"GET /?a=%00 HTTP/1.1", 400))),
    # sizes
    ("a long header", request(b"X-A: " + b"a" * 8000), 431),
    ("many headers", request(*[b"X-A: aaaaaaaaaaaaaaaaa"] * 120), 431),
    ("many small headers", request(*[b"a:"] * 120), 431),
    ("a long target", b"GET /" + b"a" * 8000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    # invalid lengths
    ("a length of 2^63", request(b"Content-Length: 9223372036854775808"), 413),
]

# Refused by libmicrohttpd before it reports the request: with its own response (docs/operations.md), or none.
BY_THE_LIBRARY = [
    *((f"Content-Length {value!r}", request(b"Content-Length: " + value)) for value in (
        b"", b"+0", b"+5", b"-1", b"-0", b"0x0", b"0x5", b"5 5", b"0.0", b"1e1", b"0_0", b"'0'", b"\"0\"", b"0;", b"\xd9\xa0", b"0, 0", b"0, 35", b"5, 5",
        b"18446744073709551616", b"99999999999999999999999999")),
    ("a NUL in a name", request(b"Transfer-Encoding\x00: chunked", body=b"0\r\n\r\n")),
    ("no colon", request(b"nonsense")),
    *((f"request line {line!r}", line + b"\r\nHost: x\r\n\r\n") for line in (
        b"GET", b"GET /version", b"GET /version HTTP/1.1 ", b"GET\t/version\tHTTP/1.1", b" GET / HTTP/1.1", b"GET /version HTTP/1",
        b"GET /version http/1.1", b"GET /version HTTP/1.1x", b"GET /version HTTP/01.1", b"GET /version XTTP/1.1",
        b"GET /version HTTP/0.9", b"GET /version HTTP/2.0", b"PRI * HTTP/2.0")),
    *((f"chunk size {size!r}", chunked(GOOD + size + b"\r\n" + b"x" * 8)) for size in (
        b"", b"-1", b"+1", b"0x1", b" 1", b"1 ", b"1 ;a", b"g", b"1_0", b"10000000000000000", b"0000000000000000001",
        b"\t1", b"1\x00", b"1\x0b", b"1;a\x00", b"1;a\x7f", b"\xef\xbc\x91")),
    ("a chunk size that a CR ends", chunked(b"1\rx{\r\n0\r\n\r\n")),
    ("a chunk longer than it says", chunked(b"1\r\n{}\r\n0\r\n\r\n")),
    ("a trailer without a colon", chunked(GOOD + b"0\r\nnonsense\r\n\r\n")),
    ("trailers of 200 KB", chunked(GOOD + b"0\r\n" + b"X: yyyyyyyyyy\r\n" * 20_000 + b"\r\n")),
    ("a head without end", b"GET / HTTP/1.1\r\n" + b"X-A: aaaaaaaaaaaaaaaaaaaaaaaa\r\n" * 1000 + b"\r\n"),
    ("a header of 100 KB", request(b"X-A: " + b"a" * 100_000)),
    ("a target of 100 KB", b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n"),
    ("a TLS handshake", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300)),
    ("bytes of all kinds", bytes(range(1, 256)) * 10),
]

# Chunked bodies that the library accepts although another parser may see another end.
LAX_CHUNKS = [
    ("a chunk size that a LF ends", chunked(b"1\n{\r\n0\r\n\r\n")),
    ("an extension that a LF ends", chunked(b"1;a\n{\r\n0\r\n\r\n")),
    ("a chunk that a LF ends", chunked(b"1\r\n{\n0\r\n\r\n")),
    ("a body that a LF ends", chunked(GOOD + b"0\r\n\n")),
    ("a trailer with a space before the colon", chunked(GOOD + b"0\r\nX : 1\r\n\r\n")),
    ("a folded trailer", chunked(GOOD + b"0\r\nX: 1\r\n y\r\n\r\n")),
    ("a NUL that ends the trailers", chunked(GOOD + b"0\r\n\x00X: 1\r\n\r\n")),
    ("extensions of 200 KB", chunked(b"1;aaaaaaaa\r\n{\r\n" * 20_000 + b"0\r\n\r\n")),
    ("nothing odd", chunked(GOOD + b"0\r\n\r\n")),
]


def all_answers(sock):
    """Everything up to the end of the connection."""
    data = b""
    while True:
        try:
            piece = sock.recv(1 << 16)
        except ConnectionResetError:
            return data
        if not piece:
            return data
        data += piece


@contextlib.contextmanager
def none_smuggled(server):
    """The route of the second request is not reached."""
    asked = dict(route="/version", status="200")
    before = server.metric("http_requests_total", **asked)
    yield
    assert server.metric("http_requests_total", **asked) == before


def send(sock, data):
    try:
        sock.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        pass


@pytest.mark.parametrize("data, status", [row[1:] for row in FRAMING], ids=[row[0] for row in FRAMING])
def test_refused_and_nothing_after_it_is_read(server, data, status):
    with none_smuggled(server), server.connect() as s:
        send(s, data + SMUGGLED)
        r = Reader(s)
        got, headers, body = r.answer()
        assert got == status, body
        assert headers["connection"] == "close" and headers["content-type"] == "application/json"
        assert len(headers["x-request-id"]) == 32
        error = error_of(body)
        assert error["code"] == status and "rc" not in error
        assert r.buffer + all_answers(s) == b""


@pytest.mark.parametrize("data", [row[1] for row in BY_THE_LIBRARY], ids=[row[0] for row in BY_THE_LIBRARY])
def test_refused_by_the_library_and_nothing_after_it_is_read(server, data):
    with none_smuggled(server), server.connect() as s:
        send(s, data + SMUGGLED)
        answer = all_answers(s)
    statuses = set(re.findall(rb"HTTP/1.1 (\d+)", answer))
    assert statuses <= {b"400", b"413", b"414", b"431", b"500", b"505"} and len(statuses) <= 1
    assert not answer or b"Connection: close" in answer


@pytest.mark.parametrize("data", [row[1] for row in LAX_CHUNKS], ids=[row[0] for row in LAX_CHUNKS])
def test_nothing_after_a_chunked_body_is_read(server, data):
    with none_smuggled(server), server.connect() as s:
        send(s, data + SMUGGLED)
        r = Reader(s)
        status, headers, body = r.answer()
        assert status == 400 and headers["connection"] == "close" and error_of(body)  # "{" is no JSON
        assert r.buffer + all_answers(s) == b""


def test_a_chunked_stream_closes_behind_it(server):
    body = json.dumps(dict(prompt="x", max_tokens=2, stream=True)).encode()
    with none_smuggled(server), server.connect() as s:
        s.sendall(chunked(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)) + SMUGGLED)
        r = Reader(s)
        status, headers, body = r.answer()
        assert status == 200 and b"[DONE]" in body
        assert r.buffer + all_answers(s) == b""


def test_byte_by_byte_is_refused_just_so(server):
    """The result does not depend on how the bytes are split."""
    for data in (FRAMING[0][1], request(b"X-A: 1\x00"), request(b"X-A: 1", b" b")):
        with server.connect() as s:
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for b in data:
                send(s, bytes([b]))
            assert Reader(s).answer()[0] == 400


FINE = [
    ("a percent-encoded path", b"GET /%76ersion HTTP/1.1\r\nHost: x\r\n\r\n"),
    ("an absolute target", b"GET http://x:80/version?a=b HTTP/1.1\r\nHost: x\r\n\r\n"),
    ("no space behind the colon", b"GET /version HTTP/1.1\r\nHost:x\r\n\r\n"),
    ("blanks around a value", b"GET /version HTTP/1.1\r\nHost: \t x \t \r\n\r\n"),
    ("an empty Host", b"GET /version HTTP/1.1\r\nHost:\r\n\r\n"),
    ("a value above ASCII", b"GET /version HTTP/1.1\r\nHost: x\r\nX-A: \xc3\xa9\r\n\r\n"),
    ("empty lines before it", b"\r\n\r\nGET /version HTTP/1.1\r\nHost: x\r\n\r\n"),
    ("HTTP/1.2", b"GET /version HTTP/1.2\r\nHost: x\r\n\r\n"),
    ("an upgrade that is passed over", b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\n"),
    ("a GET with a body", b"GET /version HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"),
    ("a HEAD with a body", b"HEAD /version HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"),
]


@pytest.mark.parametrize("data", [row[1] for row in FINE], ids=[row[0] for row in FINE])
def test_taken_and_the_connection_goes_on(server, data):
    with server.connect() as s:
        s.sendall(data + SMUGGLED)
        r = Reader(s)
        status, headers = r.head()
        assert status in (200, 204) and "connection" not in headers
        if not data.startswith(b"HEAD"):
            r.exactly(int(headers.get("content-length", 0)))
        status, headers, body = r.answer()
        assert status == 200 and "version" in json.loads(body)


def test_bare_line_feeds_end_the_connection(server):
    with server.connect() as s:
        s.sendall(b"GET /version HTTP/1.1\nHost: x\n\n" + SMUGGLED)
        r = Reader(s)
        status, headers, _ = r.answer()
        assert status == 200 and headers["connection"] == "close"
        assert r.buffer + all_answers(s) == b""


def test_http_1_0_may_stay(server):
    with server.connect() as s:
        r = Reader(s)
        for keep in (b"keep-alive", b"close"):
            s.sendall(b"GET /version HTTP/1.0\r\nConnection: " + keep + b"\r\n\r\n")
            status, headers, _ = r.answer()
            assert status == 200 and headers["connection"].lower() == keep.decode()
        assert all_answers(s) == b""


def test_continue_is_said_once_and_only_where_the_body_is_wanted(server):
    body = json.dumps(dict(prompt="x", max_tokens=2)).encode()
    with server.connect() as s:
        r = Reader(s)
        for _ in range(3):
            s.sendall(post("/v1/completions", body, "Expect: 100-continue")[:-len(body)])
            assert r.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue"
            s.sendall(body)
            assert r.answer()[0] == 200
        s.sendall(post("/nothing", body, "Expect: 100-continue")[:-len(body)])
        status, headers, _ = r.answer()
        assert status == 404 and headers["connection"] == "close"


def test_a_flood_of_requests_ahead_is_answered_in_order(server):
    """More than the server reads at once; other requests are answered meanwhile."""
    n = 3000
    with server.connect() as s:
        s.sendall(b"".join(b"GET /v1/models/%d HTTP/1.1\r\nHost: x\r\n\r\n" % i for i in range(200)))
        r = Reader(s)
        for i in range(200):
            assert f"'{i}'" in error_of(r.answer()[2])["message"]
        sent = 0
        for _ in range(n // 100):
            s.sendall(SMUGGLED * 100)
            sent += 100
            assert server.ask("GET", "/health").status_code == 200
            while sent:
                assert r.answer()[0] == 200
                sent -= 1


@pytest.mark.parametrize("value", [b"Bearer KEY\x00", b"Bearer KEY\x00x", b"Bearer \x00KEY", b"Bearer\x0bKEY", b"Bearer KEY\x7f", b"Bearer KEY\x01"])
def test_keys_with_control_bytes(start, value):
    s = start("--api-key", "KEY")

    def ask(value):
        with s.connect() as c:
            c.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nAuthorization: " + value + b"\r\n\r\n")
            return Reader(c).answer()[0]

    assert ask(b"Bearer KEY") == 200
    assert ask(value) == 400
    assert ask(b"Bearer KE") == 401


def test_a_refusal_is_in_the_log_and_metrics(start):
    s = start()
    with s.connect() as c:
        c.sendall(request(b"X : y"))
        request_id = Reader(c).answer()[1]["x-request-id"]
    s.wait_metric("http_requests_total", 1, route="/v1/completions", status="400")
    assert re.search(rf"request id={request_id} method=POST route=/v1/completions status=400", s.log)
    with s.connect() as c:
        c.sendall(request(b"nonsense"))
        all_answers(c)
    s.wait_metric("http_requests_total", 1, route="other", status="400")


# ---- time ----

def ends(sock, data=b""):
    """Whether the server closes the connection without a response while `data` is sent to it from time to time."""
    sock.settimeout(0.05)
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        send(sock, data)
        try:
            return sock.recv(1 << 16) == b""
        except TimeoutError:
            pass
        except ConnectionResetError:
            return True
    return False


@pytest.mark.parametrize("data", [b"", b"GET", b"GET /version HTTP/1.1\r\nHost: x\r\n"])
def test_a_head_must_be_whole_in_time(start, data):
    s = start("--header-timeout", "0.3")
    with s.connect() as c:
        send(c, data)
        assert ends(c)


@pytest.mark.parametrize("begin", [b"GET /", b"GET /version HTTP/1.1\r\nX: "])
def test_a_head_that_never_ends_does_not_win_time(start, begin):
    """Single bytes do not extend the deadline."""
    s = start("--header-timeout", "0.5")
    with s.connect() as c:
        send(c, begin)
        assert ends(c, b"a")


@pytest.mark.parametrize("begin", [b"GET", b"GET /version HTTP/1.1\r\nX: "])
def test_the_next_request_has_its_own_time(start, begin):
    """Between two requests a connection may be idle for longer than header-timeout."""
    s = start("--header-timeout", "1")
    with s.connect() as c:
        r = Reader(c)
        for _ in range(2):
            c.sendall(SMUGGLED)
            assert r.answer()[0] == 200
            time.sleep(2.5)
        c.sendall(begin)
        assert ends(c)


@pytest.mark.parametrize("headers, begin, more", [(["Content-Length: 1000000"], b"{", b" "), (["Transfer-Encoding: chunked"], b"1\r\n{\r\n", b"1\r\n \r\n")])
def test_a_body_must_keep_a_rate(start, headers, begin, more):
    s = start("--body-timeout", "0.5")
    with s.connect() as c:
        c.sendall(post("/v1/completions", b"", *headers, length=False) + begin)
        assert ends(c, more)


def test_a_body_that_keeps_its_rate_may_take_longer(start):
    s = start("--body-timeout", "1")
    body = json.dumps(dict(prompt="x", max_tokens=2)).encode() + b" " * (1 << 20)
    with s.connect() as c:
        data = post("/v1/completions", body)
        for i in range(0, len(data), 1 << 18):
            c.sendall(data[i:i + (1 << 18)])
            time.sleep(0.4)  # 640 KiB per second, for longer than body-timeout
        assert Reader(c).answer()[0] == 200


def test_an_answer_may_take_longer(start):
    """The deadlines apply to receiving the request, not to computing or sending the answer."""
    s = start("--header-timeout", "1", "--body-timeout", "1", model="null:100000")
    with s.connect() as c:
        c.sendall(post("/v1/completions", dict(prompt="x", max_tokens=25, ignore_eos=True)))
        begun = time.monotonic()
        assert Reader(c).answer()[0] == 200
        assert time.monotonic() - begun > 2


def test_a_tls_handshake_must_be_done_in_time(start, tmp_path):
    cert, key = make_certificate(tmp_path, "a")
    s = start("--ssl-certfile", cert, "--ssl-keyfile", key, "--header-timeout", "3")
    with s.connect() as c:
        c.sendall(b"\x16\x03\x01\x02\x00")
        assert all_answers(c) == b""
    context = ssl.create_default_context(cafile=cert)
    context.check_hostname = False
    with s.connect() as c, context.wrap_socket(c) as t:
        t.sendall(request(b"Content-Length: 0", b"Content-Length: 1") + SMUGGLED)
        r = Reader(t)
        assert r.answer()[0] == 400
        with contextlib.suppress(ssl.SSLError, ConnectionResetError):
            assert r.more() == b""


# ---- limits on connections ----

def fill(server, n, data=b""):
    socks = []
    for _ in range(n):
        s = server.connect()
        if data:
            s.sendall(data)
        socks.append(s)
    return socks


@pytest.mark.parametrize("data", [b"", b"GET /v", request(b"Content-Length: 100000"), b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"],
                         ids=["silent", "half a head", "half a body", "answers that are not taken"])
def test_silent_sockets_do_not_lock_health_out(start, data):
    s = start("--max-connections", "20", "--header-timeout", "100", "--body-timeout", "100")
    socks = fill(s, 200, data)
    for _ in range(5):
        with s.connect() as c:
            c.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            status, headers, body = Reader(c).answer()
            assert status == 200 and headers["connection"] == "close"
    with s.connect() as c:
        c.sendall(post("/v1/completions", dict(prompt="x")))
        status, headers, body = Reader(c).answer()
        assert status == 503 and "max-connections" in error_of(body)["message"] and headers["retry-after"]
    for c in socks:
        c.close()
    wait_taken(s)
    s.wait_metric("http_connections", 1)
    assert s.ask("POST", "/v1/completions", json=dict(prompt="x")).status_code == 200


def test_connections_come_back(start):
    """The counts return to zero, however the connections ended."""
    s = start("--max-connections", "21")  # one more: that which asked for the metric may still be closing
    for _ in range(5):
        socks = fill(s, 20, b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        for c in socks:
            assert Reader(c).answer()[0] == 200
            c.close()
        wait_taken(s)
        s.wait_metric("http_connections", 1)


def own_address():
    """An address of this machine that is not loopback; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has loopback alone")
        return s.getsockname()[0]


@pytest.mark.parametrize("flags, most", [([], 10), (["--max-connections-per-address", "3"], 3), (["--trusted-proxies", "0.0.0.0/0"], 12)])
def test_connections_of_one_address(start, flags, most):
    address = own_address()
    s = start("--host", "0.0.0.0", "--max-connections", "40", "--header-timeout", "100", *flags)
    with contextlib.ExitStack() as stack:
        def served():
            c = stack.enter_context(socket.create_connection((address, s.port), timeout=PATIENCE_S))
            send(c, SMUGGLED)
            try:
                return Reader(c).answer()[0] == 200
            except (EOFError, ConnectionResetError):
                return False

        assert [served() for _ in range(12)] == [True] * most + [False] * (12 - most)
        assert s.ask("GET", "/version").status_code == 200  # from loopback
        assert s.metric("http_connections_refused_total") == 12 - most


# ---- the admin listener ----

def admin_of(server):
    return re.search(r" admin url=(\S+)", server.log)[1]


def test_admin_listen_serves_what_the_operator_asks(start):
    s = start("--admin-listen", "127.0.0.1:0", "--api-key", "KEY", "--max-connections", "4", "--header-timeout", "100")
    port = int(admin_of(s).rsplit(":", 1)[1])

    def ask(path, data=b"", method=b"GET"):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as c:
            c.sendall(method + b" " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            return Reader(c).answer()

    socks = fill(s, 100)
    assert ask(b"/health")[0] == 200 and ask(b"/ping")[0] == 200
    status, _, body = ask(b"/metrics")  # loopback: without a key
    assert status == 200 and b"http_connections" in body
    for path, method in ((b"/version", b"GET"), (b"/v1/models", b"GET"), (b"/v1/completions", b"POST"), (b"/", b"GET"), (b"/debug/kv", b"GET")):
        assert ask(path, b"{}" if method == b"POST" else b"", method)[0] in (401, 404)
    for c in socks:
        c.close()
    wait_taken(s)
    assert s.ask("GET", "/metrics").status_code == 401  # the main listener asks for a key


@pytest.mark.parametrize("data", [b"", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["silent", "answers that are not taken"])
def test_silent_sockets_do_not_lock_the_operator_out(start, data):
    s = start("--admin-listen", "127.0.0.1:0", "--header-timeout", "100")
    port = int(admin_of(s).rsplit(":", 1)[1])
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            send(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)), data)
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as c:
                c.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                assert Reader(c).answer()[0] == 200


def test_admin_listen_on_a_unix_socket(start, tmp_path):
    path = str(tmp_path / "admin")
    s = start("--admin-listen", "unix:" + path, "--api-key", "KEY")
    assert admin_of(s) == "unix:" + path
    with socket.socket(socket.AF_UNIX) as c:
        c.settimeout(PATIENCE_S)
        c.connect(path)
        c.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert Reader(c).answer()[0] == 200


def test_admin_listen_for_everyone_asks_for_the_key(start):
    s = start("--admin-listen", "0.0.0.0:0", "--api-key", "KEY")
    port = int(admin_of(s).rsplit(":", 1)[1])

    def ask(path, *headers):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as c:
            c.sendall(b"\r\n".join([b"GET " + path + b" HTTP/1.1", b"Host: x", *headers]) + b"\r\n\r\n")
            return Reader(c).answer()[0]

    assert ask(b"/health") == 200
    assert ask(b"/metrics") == 401
    assert ask(b"/metrics", b"Authorization: Bearer KEY") == 200


@pytest.mark.parametrize("flag, value", [
    ("--admin-listen", "nowhere"), ("--admin-listen", "127.0.0.1:"), ("--admin-listen", "127.0.0.1:70000"), ("--admin-listen", "::1:80"),
    ("--trusted-proxies", "10.0.0.0/33"), ("--trusted-proxies", "10.0.0.0/8,"), ("--trusted-proxies", "example.org"),
    ("--header-timeout", "0"), ("--body-timeout", "-1"), ("--max-connections-per-address", "-1")])
def test_bad_settings_are_named(start, flag, value):
    s = start(flag, value, wait=False)
    assert s.process.wait(PATIENCE_S) != 0
    assert flag[2:] in s.log.replace("_", "-")
