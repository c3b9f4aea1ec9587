"""Keys with names and limits: the limits, and reloading the file while the server runs."""
import hashlib
import json
import signal
import socket
import ssl
import subprocess
import time

import httpx
import openai
import pytest

from conftest import PACED, PATIENCE_S
from raw import Reader, error_of, post

# On the delayed model it ends long after any test.
LONG = dict(prompt="x", max_tokens=30000, ignore_eos=True, stream=True)


def wait_log(server, text, seconds=PATIENCE_S):
    end = time.monotonic() + seconds
    while text not in server.log:
        assert time.monotonic() < end, server.log
        time.sleep(0.02)


class Asker:
    def __init__(self, server, key):
        self.url, self.headers = server.url, {"Authorization": "Bearer " + key}

    def __call__(self, **fields):
        return httpx.post(self.url + "/v1/completions", json={"prompt": "abcd", "max_tokens": 2, **fields}, headers=self.headers,
                          timeout=PATIENCE_S)


@pytest.fixture
def keys(tmp_path):
    return tmp_path / "keys"


def test_limits_are_told_and_kept(start, keys):
    digest = hashlib.sha256(b"sk-bob").hexdigest()
    keys.write_text("name=alice key=sk-alice requests_per_minute=3\n"
                    f"name=bob sha256={digest} tokens_per_minute=60\nsk-plain\n")
    s = start("--api-key-file", str(keys))
    alice, bob, plain = (Asker(s, k) for k in ("sk-alice", "sk-bob", "sk-plain"))
    for left in (2, 1, 0):
        a = alice()
        assert a.status_code == 200
        assert a.headers["x-ratelimit-limit-requests"] == "3" and a.headers["x-ratelimit-remaining-requests"] == str(left)
        assert "x-ratelimit-limit-tokens" not in a.headers
    a = alice()
    error = error_of(a.content)
    assert a.status_code == 429 and error["type"] == "rate_limit_error" and "3 requests per minute" in error["message"]
    wait_s = int(a.headers["retry-after"])  # one every 20 s
    assert 1 <= wait_s <= 20 and wait_s == -(-int(a.headers["retry-after-ms"]) // 1000)
    assert a.headers["x-ratelimit-remaining-requests"] == "0" and a.headers["x-ratelimit-reset-requests"].endswith("s")
    a = bob(max_tokens=58)  # 4 of the prompt, 58 generated: the level is -2, refilled by 1 per second
    assert a.status_code == 200 and a.headers["x-ratelimit-limit-tokens"] == "60"
    s.wait_metric("key_generation_tokens_total", 58, key="bob")
    a = bob()
    assert a.status_code == 429 and "60 tokens per minute" in error_of(a.content)["message"]
    assert 1 <= int(a.headers["retry-after"]) <= 6
    assert plain().status_code == 200 and "x-ratelimit-limit-requests" not in plain().headers
    for name, value in (("key_requests_total", 4), ("key_requests_limited_total", 1)):
        assert s.metric(name, key="alice") == value
    assert s.metric("key_requests_limited_total", key="bob", limit="tokens") == 1
    assert s.metric("key_prompt_tokens_total", key="key-3") == 8
    assert "sk-" not in s.get("/metrics") and "sk-alice" not in s.log


def charged(server, key="a"):
    return server.metric("key_generation_tokens_total", key=key)


def test_what_is_drawn_is_charged(start, keys):
    keys.write_text("name=a key=k tokens_per_minute=1000\n")
    s = start("--api-key-file", str(keys))
    ask = Asker(s, "k")
    a = ask(n=1, best_of=8, max_tokens=50, temperature=1, ignore_eos=True).json()
    assert a["usage"]["completion_tokens"] == 400 == charged(s) == s.metric("generation_tokens_total")
    a = ask(n=1, beam_width=4, use_beam_search=True, max_tokens=10, ignore_eos=True)
    assert a.json()["usage"]["completion_tokens"] == 10 and charged(s) == 440 == s.metric("generation_tokens_total")
    # Minutes below zero.
    a = ask(prompt=["abcd"] * 2, best_of=64, max_tokens=50, temperature=1, ignore_eos=True)
    assert a.json()["usage"]["completion_tokens"] == 6400 and ask().status_code == 429


def test_a_client_that_leaves_pays(start, keys):
    keys.write_text("name=a key=k tokens_per_minute=1000000\n")
    s = start("--api-key-file", str(keys), model=PACED)
    with s.connect() as c:
        c.sendall(post("/v1/completions", {**LONG, "n": 4, "temperature": 1}, "Authorization: Bearer k"))
        r = Reader(c)
        assert r.head()[0] == 200
        while r.buffer.count(b"text_completion") < 40:
            r.more()
    s.wait_metric("http_streams", 0)
    assert charged(s) == s.metric("generation_tokens_total") >= 40


def test_a_recompute_is_not_charged_again(start, keys):
    keys.write_text("name=a key=k tokens_per_minute=1000000\n")
    s = start("--api-key-file", str(keys), "--kv-blocks", "40", "--max-model-len", "512", "--preemption", "recompute")
    prompt, made = [1] * 100, 300
    a = httpx.post(s.url + "/v1/completions", headers={"Authorization": "Bearer k"}, timeout=PATIENCE_S,
                   json=dict(prompt=[prompt] * 6, max_tokens=made, temperature=1, ignore_eos=True)).json()
    assert s.metric("num_preemptions_total") > 0 and a["usage"]["completion_tokens"] == 6 * made
    assert charged(s) == s.metric("generation_tokens_total") == 6 * made
    assert s.metric("key_prompt_tokens_total", key="a") == 6 * len(prompt)


def test_texts_that_make_no_token_are_limited(start, keys):
    keys.write_text("name=a key=ka requests_per_minute=3\nname=b key=kb tokens_per_minute=60\n")
    s = start("--api-key-file", str(keys))

    def send(key, path, **body):
        return httpx.post(s.url + path, json=body, headers={"Authorization": "Bearer " + key}, timeout=PATIENCE_S)

    assert send("ka", "/tokenize", prompt="x").status_code == 200
    a = send("ka", "/detokenize", tokens=[65])
    assert a.status_code == 200 and a.headers["x-ratelimit-remaining-requests"] == "1"
    assert send("ka", "/v1/chat/completions", messages=[]).status_code == 400
    a = send("ka", "/tokenize", prompt="x")
    assert a.status_code == 429 and "3 requests per minute" in error_of(a.content)["message"]
    # 60 tokens are 960 bytes: one larger body takes the bucket below zero.
    assert send("kb", "/tokenize", prompt="x" * 4000).status_code == 200
    for path, body in (("/tokenize", dict(prompt="x" * 200)), ("/detokenize", dict(tokens=[65] * 100)),
                       ("/v1/chat/completions", dict(messages=[{"role": "user", "content": "x" * 200}])),
                       ("/v1/completions", dict(prompt="x", user="x" * 200))):
        a = send("kb", path, **body)
        assert a.status_code == 429 and "960 bytes of request bodies" in error_of(a.content)["message"]
        assert int(a.headers["retry-after"]) >= 60
    assert s.metric("key_requests_limited_total", key="b", limit="bytes") == 4


PREFIX = "You are the mate of a small ketch. "
COMMON = PREFIX + "What does a mate do, and what does a small ketch need when the wind turns? "


def cached(server, key, prompt=COMMON, **fields):
    a = httpx.post(server.url + "/v1/completions", json=dict(prompt=prompt, max_tokens=2, **fields), timeout=PATIENCE_S,
                   headers={"Authorization": "Bearer " + key})
    return a.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def whole_blocks(text):
    return (len(text) - 1) // 16 * 16


def test_a_key_does_not_see_what_another_sent(start, keys, tmp_path):
    (tmp_path / "quire.yaml").write_text(f"prefixes:\n  - {json.dumps(PREFIX)}\n")
    config = "--config", str(tmp_path / "quire.yaml")
    keys.write_text("name=a key=ka\nname=b key=kb\nkc\nkd\n")
    pinned, whole = len(PREFIX) // 16 * 16, whole_blocks(COMMON)
    assert 0 < pinned < whole
    s = start("--api-key-file", str(keys), *config)
    for key in ("ka", "kb", "kc", "kd"):  # the setting prefixes is shared by all keys
        assert [cached(s, key), cached(s, key)] == [pinned, whole]
    # A salt separates requests of one key, and salts of different keys are distinct.
    assert cached(s, "ka", cache_salt="x") == pinned
    assert cached(s, "kb", cache_salt="x") == pinned
    assert cached(s, "ka", cache_salt="x") == whole
    # Keys without a name are reordered: the cache of the third line's key is not shared with its successor.
    keys.write_text("name=a key=ka\nname=b key=kb\nkd\nke\n")
    s.process.send_signal(signal.SIGHUP)
    wait_log(s, "keys reloaded")
    assert [cached(s, "ka"), cached(s, "kd"), cached(s, "ke")] == [whole, pinned, pinned]


def test_keys_of_flags_are_keys(start):
    s = start("--api-key", "ka", "--api-key", "kb")
    assert [cached(s, "ka"), cached(s, "kb"), cached(s, "ka")] == [0, 0, whole_blocks(COMMON)]


def test_a_cache_for_the_whole_server(start, keys):
    keys.write_text("name=a key=ka\nname=b key=kb\n")
    s = start("--api-key-file", str(keys), "--prefix-cache-scope", "server")
    assert [cached(s, "ka"), cached(s, "kb"), cached(s, "kb", cache_salt="x")] == [0, whole_blocks(COMMON), 0]


def test_without_keys_all_share(start):
    s = start()
    assert [cached(s, "ka"), cached(s, "kb")] == [0, whole_blocks(COMMON)]


def test_sdk_waits_as_long_as_it_is_told(start, keys):
    keys.write_text("name=a key=k requests_per_minute=60\n")
    s = start("--api-key-file", str(keys))
    with openai.OpenAI(base_url=s.url + "/v1", api_key="k", max_retries=3) as client:
        for _ in range(62):
            client.completions.create(model="null", prompt="x", max_tokens=1)


def test_requests_at_once(start, keys):
    keys.write_text("name=a key=k concurrent_requests=2\n")
    s = start("--api-key-file", str(keys), model=PACED)
    under_way = [s.connect() for _ in range(2)]
    for c in under_way:
        c.sendall(post("/v1/completions", LONG, "Authorization: Bearer k"))
        assert Reader(c).head()[0] == 200
    ask = Asker(s, "k")
    a = ask()
    assert a.status_code == 429 and a.headers["retry-after"] == "1"
    under_way.pop().close()
    end = time.monotonic() + PATIENCE_S
    while (status := ask().status_code) == 429:
        assert time.monotonic() < end
    assert status == 200
    under_way.pop().close()


def test_priority_bounds(start, keys):
    keys.write_text("name=a key=k priority=1..5\n")
    s = start("--api-key-file", str(keys), "--policy", "priority")
    ask = Asker(s, "k")
    assert ask().status_code == ask(priority=5).status_code == 200
    for p in (0, 6):
        a = ask(priority=p)
        assert a.status_code == 400 and error_of(a.content)["param"] == "priority"


def test_bad_file_at_start(start, keys):
    keys.write_text("fine\nname=a\n")
    s = start("--api-key-file", str(keys), wait=False)
    assert s.process.wait(PATIENCE_S) == 2 and "api_key_file line 2" in s.log


def test_reload_takes_the_new_file_or_keeps_the_old(start, keys):
    keys.write_text("name=a key=old\n")
    s = start("--api-key-file", str(keys), model=PACED)
    old, new = Asker(s, "old"), Asker(s, "new")
    assert old().status_code == 200 and new().status_code == 401
    with s.connect() as running:
        running.sendall(post("/v1/completions", LONG, "Authorization: Bearer old"))
        r = Reader(running)
        assert r.head()[0] == 200
        keys.write_text("name=a key=new\nname=b\n")
        s.process.send_signal(signal.SIGHUP)
        wait_log(s, "keys not reloaded")
        assert "api_key_file line 2" in s.log and s.log.count("keys not reloaded") == 1
        assert old().status_code == 200 and new().status_code == 401
        keys.write_text("name=a key=new\n")
        s.process.send_signal(signal.SIGHUP)
        wait_log(s, '"keys reloaded" keys=1')
        assert "restart" in s.log  # the settings are not read again
        assert old().status_code == 401 and new().status_code == 200
        for _ in range(3):  # running requests go on
            r.more()
            assert not r.closed
    assert s.stop() == 0


def make_certificate(folder, name):
    paths = str(folder / (name + ".pem")), str(folder / (name + ".key"))
    made = subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                           "-days", "2", "-subj", "/CN=" + name, "-keyout", paths[1], "-out", paths[0]], capture_output=True)
    if made.returncode:
        pytest.skip("openssl made no certificate")
    return paths


def shown_certificate(server):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((server.host, server.port), timeout=PATIENCE_S) as c, context.wrap_socket(c) as t:
        return ssl.DER_cert_to_PEM_cert(t.getpeercert(True))


def test_certificate_is_replaced_under_way(start, tmp_path):
    first, second = make_certificate(tmp_path, "first"), make_certificate(tmp_path, "second")
    cert, key = tmp_path / "cert", tmp_path / "key"

    def put(c, k):
        cert.write_bytes(open(c, "rb").read())
        key.write_bytes(open(k, "rb").read())

    put(*first)
    s = start("--ssl-certfile", str(cert), "--ssl-keyfile", str(key))
    assert shown_certificate(s) == open(first[0]).read()
    put(second[0], first[1])
    s.process.send_signal(signal.SIGHUP)
    wait_log(s, "certificate not reloaded")
    assert shown_certificate(s) == open(first[0]).read()
    put(*second)
    s.process.send_signal(signal.SIGHUP)
    wait_log(s, '"certificate reloaded"')
    assert shown_certificate(s) == open(second[0]).read()
    s.process.send_signal(signal.SIGHUP)
    wait_log(s, "certificate unchanged")
    assert s.stop() == 0


def test_mismatched_certificate_at_start(start, tmp_path):
    first, second = make_certificate(tmp_path, "first"), make_certificate(tmp_path, "second")
    s = start("--ssl-certfile", first[0], "--ssl-keyfile", second[1], wait=False)
    assert s.process.wait(PATIENCE_S) == 1 and "is not the key of" in s.log


def test_a_flood_leaves_room_in_the_queue(start, keys):
    """With policy fair one key's flood takes at most half of the queue, and another key's request runs at once."""
    keys.write_text("name=flood key=f\nname=calm key=c\n")
    s = start("--api-key-file", str(keys), "--policy", "fair", "--max-num-seqs", "4", "--max-queue", "20", model=PACED)
    flood, status = [], 200
    while status == 200 and len(flood) < 30:
        flood.append(s.connect())
        flood[-1].sendall(post("/v1/completions", LONG, "Authorization: Bearer f"))
        r = Reader(flood[-1])
        status, headers = r.head()
    assert status == 429 and int(headers["retry-after"]) >= 1
    assert "share of the queue" in error_of(r.exactly(int(headers["content-length"])))["message"]
    assert 12 <= len(flood) <= 15  # 4 that run and half of the queue, or all of them still queued
    s.wait_metric("num_requests_running", 4)
    assert Asker(s, "c")(max_tokens=3).status_code == 200  # the flood's four would run for five minutes
    for c in flood:
        c.close()
    s.wait_idle()
