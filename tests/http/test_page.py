"""The page at / and its data, /debug/kv; in a real browser if one is installed."""
import base64
import json
import time

import httpx
import pytest

import browser
from conftest import PATIENCE_S, ROOT
from raw import Reader, error_of, post

ASK = dict(prompt="a prompt of some blocks", n=3, temperature=1.0, max_tokens=4000, ignore_eos=True)


def once(s, query="", **more):
    return s.ask("GET", "/debug/kv?once" + query, **more)


def fnv1a(data):
    h = 2166136261
    for byte in data:
        h = (h ^ byte) * 16777619 % 2**32
    return h


def watch(s, query=""):
    """A socket with the events of /debug/kv, and a reader positioned after their headers."""
    sock = s.connect()
    sock.sendall(f"GET /debug/kv{query} HTTP/1.1\r\nHost: quire\r\n\r\n".encode())
    reader = Reader(sock)
    status, headers = reader.head()
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    return sock, reader


def pictures(reader):
    for chunk in reader.chunks():
        for event in chunk.decode().split("\n\n"):
            if event.startswith("data: {"):
                yield json.loads(event[len("data: "):])


# ---- the page ----

def test_page_headers(server):
    a, b = server.ask("GET", "/"), server.ask("GET", "/")
    assert a.status_code == 200 and a.headers["content-type"] == "text/html; charset=utf-8"
    policy = a.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    nonce = policy.split("'nonce-")[1].split("'")[0]
    assert a.text.count(f'nonce="{nonce}"') == 2 and "@NONCE@" not in a.text
    assert nonce not in b.text and a.headers["x-content-type-options"] == "nosniff"
    for forbidden in ("http://", "https://", " onclick", " style="):
        assert forbidden not in a.text.replace("http://www.w3.org/2000/svg", "")
    assert server.ask("HEAD", "/").status_code == 200
    assert server.ask("POST", "/", json={}).status_code == 405


def test_no_ui(start):
    s = start("--no-ui")
    for path in ("/", "/debug/kv", "/debug/kv?once"):
        a = s.ask("GET", path)
        assert a.status_code == 404 and "--no-ui" in error_of(a.content)["message"]


def test_key_is_asked(start):
    s = start("--api-key", "k")
    assert s.ask("GET", "/").status_code == 200
    assert once(s).status_code == 401
    assert s.ask("GET", "/debug/kv").status_code == 401
    assert once(s, headers={"Authorization": "Bearer k"}).status_code == 200


# ---- snapshots ----

def test_snapshot(start):
    s = start("--kv-blocks", "2000", model="null:10000")
    p = once(s, "&n=100").json()
    assert p["pool"]["blocks"] == 2000 and p["pool"]["used"] == 0 and p["requests"] == [] and p["chat"] is False
    assert base64.b64decode(p["pool"]["map"]) == bytes(100)
    with httpx.stream("POST", s.url + "/v1/completions", json=dict(ASK, stream=True), headers={"X-Request-Id": "mine"}, timeout=PATIENCE_S):
        s.wait_metric("num_requests_running", 3)
        p = once(s, "&n=1000").json()
        cells = base64.b64decode(p["pool"]["map"])
        [r] = p["requests"]
        assert r["state"] == "running" and r["width"] == r["live"] == 3 and r["max_tokens"] == 4000
        assert r["tag"] == fnv1a(b"cmpl-mine")
        count = [0] * 1000
        for q in r["seqs"]:
            assert q["blocks"] == sum(q["runs"][2::3])
            for place, block, n in zip(*[iter(q["runs"])] * 3):
                for b in range(block, block + n):
                    count[b] += 1
        assert [c if c != 255 else 0 for c in cells] == count
        assert max(count) == 3 and sum(map(bool, count)) == p["pool"]["used"]
    s.wait_metric("num_requests_running", 0)
    p = once(s, "&n=100").json()
    assert p["pool"]["used"] == 0 and p["pool"]["cached"] > 0 and 255 in base64.b64decode(p["pool"]["map"])


def test_window(start):
    s = start("--kv-blocks", "5000")
    p = once(s, "&first=4990&n=100").json()
    assert p["pool"]["first"] == 4900 and len(base64.b64decode(p["pool"]["map"])) == 100
    assert p["overview"]["cell"] == 20 and len(base64.b64decode(p["overview"]["map"])) == 2 * 250
    for query, name in (("&n=0", "n"), ("&n=x", "n"), ("&n=8193", "n"), ("&first=-1", "first"), ("&first=", "first")):
        assert error_of(once(s, query).content)["param"] == name


def test_events(start):
    s = start("--kv-blocks", "2000", model="null:10000")
    sock, reader = watch(s, "?n=64")
    seen = pictures(reader)
    assert next(seen)["requests"] == []
    with httpx.stream("POST", s.url + "/v1/completions", json=dict(ASK, stream=True), timeout=PATIENCE_S):
        copies = 0
        while copies < 2:  # of three holders of the prompt's last block
            copies += sum(kind == "copy" for kind, _, _ in next(seen)["events"])
        times = [next(seen)["ms"] for _ in range(6)]
        assert all(b - a >= 90 for a, b in zip(times, times[1:]))
    while next(seen)["requests"]:
        pass
    sock.close()
    s.wait_metric("http_streams", 0)
    assert s.metric("clients_gone_total") == 1  # the completion's; subscribers that leave are not counted


def test_many_watch_and_some_do_not_read(start):
    s = start("--kv-blocks", "2000", model="null:1000")
    socks = []
    for _ in range(32):
        socks.append(watch(s, "?n=2000")[0])
    full = s.ask("GET", "/debug/kv")
    assert full.status_code == 429 and "32" in error_of(full.content)["message"]
    a = s.ask("POST", "/v1/completions", json=dict(prompt="x", max_tokens=300))
    assert a.json()["usage"]["completion_tokens"] == 300
    for sock in socks:
        sock.close()
    s.wait_metric("http_streams", 0)
    assert once(s).status_code == 200


def test_watchers_do_not_hold_a_drain(start):
    s = start("--shutdown-timeout", "60")
    sock, reader = watch(s)
    unread, _ = watch(s, "?n=8192")
    assert s.stop() == 0
    body = reader.buffer + b"".join(iter(lambda: sock.recv(65536), b""))
    assert b"shutting down" in body and b"[DONE]" in body
    unread.close()


def test_long_step(start):
    """A step of a minute: snapshots report the stall, and /health answers."""
    s = start("--step-timeout", "1", model="null:60000000")
    sock, reader = watch(s)
    seen = pictures(reader)
    assert next(seen)["pool"]["used"] == 0
    work = s.connect()
    work.sendall(post("/v1/completions", dict(ASK, stream=True)))
    while "stalled_ms" not in next(seen):
        pass
    assert once(s).status_code == 503
    end = time.monotonic() + PATIENCE_S
    while (a := s.ask("GET", "/health")).json()["status"] != "stalled":
        assert time.monotonic() < end
    assert a.status_code == 503
    sock.close()
    work.close()


# ---- masks ----

def test_masks_of_a_text(server):
    schema = {"type": "object", "properties": {"a": {"enum": ["red", "green"]}}, "required": ["a"], "additionalProperties": False}
    a = server.ask("POST", "/debug/masks", json={"schema": schema, "text": '{"a": "red"}'}).json()
    assert "".join(a["tokens"]) == '{"a": "red"}' and len(a["allowed"]) == len(a["tokens"]) + 1
    assert a["end"] == "text" and a["complete"] and all(0 < n < a["vocabulary"] for n in a["allowed"][:-1])
    assert a["allowed"][0] == 1 or a["tokens"][0] != "{"  # nothing but a brace, alone or with more behind it
    free = server.ask("POST", "/debug/masks", json={"schema": True, "text": ""}).json()
    assert free["tokens"] == [] and free["allowed"][0] > a["allowed"][0] and not free["complete"]


def test_masks_end_where_the_text_leaves_the_schema(server):
    a = server.ask("POST", "/debug/masks", json={"schema": {"type": "integer"}, "text": "12x"}).json()
    assert "".join(a["tokens"]) == "12" and a["end"] == "grammar" and a["complete"]


def test_masks_are_bounded_and_checked(server):
    a = server.ask("POST", "/debug/masks", json={"schema": {"type": "array"}, "text": "[" + "1," * 4000}).json()
    assert a["end"] == "time" and len(a["tokens"]) <= 512
    for body, param in (({"text": "x"}, "schema"), ({"schema": 5}, "schema"), ({"schema": {"type": "no"}}, "schema"),
                        ({"schema": True, "text": 5}, "text")):
        r = server.ask("POST", "/debug/masks", json=body)
        assert r.status_code == 400 and r.json()["error"]["param"] == param, body


# ---- a browser ----

@pytest.fixture
def chromium():
    if not browser.find():
        pytest.skip("no chromium here: apt-get install chromium")
    b = browser.Browser()
    yield b
    b.close()


# Distinct colours of the canvas other than greys, each with many pixels.
COLOURS = """(() => {
    const c = document.getElementById("grid"), d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data, n = {};
    for (let i = 0; i < d.length; i += 4) {
        const [r, g, b, a] = d.slice(i, i + 4);
        if (a > 250 && Math.max(r, g, b) - Math.min(r, g, b) > 40) n[[r, g, b]] = (n[[r, g, b]] || 0) + 1;
    }
    return Object.values(n).filter(n => n > 60).length;
})()"""


def test_in_a_browser(start, chromium):
    s = start("--kv-blocks", "1024", model="null:80000")
    b = chromium
    b.size(1280, 900)
    b.open(s.url + "/")
    b.wait("document.getElementById('c-used').textContent.startsWith('0 of 1024')")
    assert b.js(COLOURS) == 0
    b.js("document.getElementById('max_tokens').value = 4000")
    b.js("document.getElementById('prompt').select()")
    b.type("Is anybody there, behind this prompt of two blocks?")
    b.key("Enter", modifiers=2)
    b.wait("document.querySelectorAll('.answer').length == 3")
    b.wait("[...document.querySelectorAll('.answer .text')].every(t => t.textContent.length > 40)")
    b.wait("document.querySelectorAll('#tables .chip.shared').length >= 6")
    assert b.wait(COLOURS + " >= 3")
    b.js("document.getElementById('grid').focus()")
    b.key("ArrowRight")
    b.wait("document.getElementById('note').textContent.startsWith('Block 0: shared by 3')")
    b.js("document.querySelector('.answer .text').focus()")
    b.key("ArrowRight")
    b.wait("document.querySelectorAll('#tip tr').length >= 5")
    b.js("document.getElementById('stop').click()")
    b.wait("!document.getElementById('go').disabled")
    s.wait_metric("num_requests_running", 0)
    b.wait("document.getElementById('tables').textContent.includes('Nothing runs')")
    b.size(390, 844, phone=True, dark=True)
    b.wait("document.documentElement.scrollWidth == 390")
    assert b.complaints == []


def test_a_mask_in_a_browser(start, chromium):
    s = start()
    b = chromium
    b.size(1280, 900)
    b.open(s.url + "/")
    b.wait("document.getElementById('dot').className == 'dot live'")
    b.js("document.querySelector('#rules summary').focus()")
    b.key("Enter")
    b.wait("document.getElementById('rules').open")
    b.js("document.getElementById('schema').focus()")
    b.type('{"enum": ["a long word that is forced", "another"]}')
    b.js("document.getElementById('n').value = 1; document.getElementById('schema').blur()")
    b.wait("document.querySelectorAll('#mask li').length == 1")  # before there is an answer
    b.js("document.getElementById('ask').requestSubmit()")
    b.wait("/^\"a/.test(document.querySelector('.answer .text')?.textContent) && !document.getElementById('go').disabled")
    b.wait("document.querySelectorAll('#mask li').length > 3 && document.querySelectorAll('#mask .forced').length > 1")
    b.js("document.getElementById('schema').value = '{'; document.getElementById('schema').dispatchEvent(new Event('change'))")
    b.wait("document.getElementById('mask-note').textContent.startsWith('schema: ')")
    b.js("document.getElementById('ask').requestSubmit()")
    b.wait("document.getElementById('error').textContent.startsWith('schema: ')")
    b.size(390, 844, phone=True)
    b.wait("document.documentElement.scrollWidth == 390")
    assert b.complaints == []


def test_drafts_in_a_browser(start, chromium):
    """Tokens that were drafts are marked, counted, and say so."""
    s = start("--speculate", "draft", "--draft-model", f"{ROOT}/models/demo", "--max-draft", "3", model=f"{ROOT}/models/demo", env={"QUIRE_STEP_COSTS": "unknown"})
    b = chromium
    b.size(1280, 900)
    b.open(s.url + "/")
    b.wait("document.getElementById('dot').className == 'dot live'")
    assert b.js("getComputedStyle(document.querySelector('.of-drafts')).display") == "none"
    b.js("document.getElementById('n').value = 1; document.getElementById('max_tokens').value = 40")
    b.js("document.getElementById('prompt').select()")
    b.type("Once upon a time there was a red ball.")
    b.js("document.getElementById('ask').requestSubmit()")
    b.wait("/ drafted · /.test(document.querySelector('.answer')?.innerText) && !document.getElementById('go').disabled")
    marked = b.js("document.querySelectorAll('.answer .token.drafted').length")
    assert marked == s.metric("spec_decode_num_accepted_tokens_total") > 10
    assert f", {marked:.0f} drafted" in b.js("document.querySelector('.answer').innerText")
    line, plain = (b.js(f"getComputedStyle(document.querySelector('.answer .token{which}')).textDecorationLine")
                   for which in (".drafted", ":not(.drafted)"))
    assert (line, plain) == ("underline", "none")
    assert b.js("getComputedStyle(document.querySelector('.of-drafts')).display") == "inline"
    b.js("document.querySelector('.answer .text').focus()")
    b.key("End")
    while not b.js("document.querySelector('.token.at').classList.contains('drafted')"):
        b.key("ArrowLeft")
    b.wait("document.getElementById('tip').textContent.endsWith('drafted, and found right')")
    assert b.complaints == []


def test_in_a_browser_with_a_key(start, chromium):
    s = start("--api-key", "secret")
    b = chromium
    b.open(s.url + "/")
    b.wait("document.getElementById('about').textContent.includes('API key')")
    b.js("document.getElementById('key').focus()")
    b.type("secret")
    b.key("Enter")
    b.wait("document.getElementById('dot').className == 'dot live'")
    assert b.js("sessionStorage.getItem('key')") == "secret" and b.js("localStorage.length") == 0
    b.js("document.getElementById('max_tokens').value = 0")
    b.js("document.getElementById('ask').noValidate = true; document.getElementById('ask').requestSubmit()")
    b.wait("document.getElementById('error').textContent.includes('max_tokens')")
