"""What clients do not read is bounded in bytes, all of it together (client-buffer-bytes), and comes back when they are gone."""
import json
import socket

import pytest

from conftest import PATIENCE_S
from raw import Reader, post

MIB = 1 << 20
BUDGET = 64 * MIB
# Far below what the answers would take, far above the budget and what else a server holds, also with a sanitizer's memory.
MOST_RSS = 500 * MIB


def rss(server):
    pages = int(open(f"/proc/{server.process.pid}/statm").read().split()[1])
    return pages * 4096


def ask_unread(server, path, body):
    """A request whose answer stays in the server but for what a small socket takes."""
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    s.settimeout(PATIENCE_S)
    s.connect((server.host, server.port))
    s.sendall(post(path, body))
    return s


def statuses(sockets):
    """Of each answer, and whether it says when to come again."""
    for s in sockets:
        status, headers = Reader(s).head()
        yield status, "retry-after" in headers


ANSWERS = {
    # 24 MiB of JSON, of which most is certain beforehand.
    "completion": ("/v1/completions", dict(prompt="a" * 4000, max_tokens=1, n=32, echo=True, logprobs=20)),
    # 30 MiB: four million ids and their texts.
    "tokenize": ("/tokenize", dict(prompt="a" * 4_000_000, return_token_strs=True)),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_unread_answers_are_bounded(start, kind):
    s = start("--client-buffer-bytes", str(BUDGET))
    path, body = ANSWERS[kind]
    before = rss(s)
    waiting, most = [], 0
    for _ in range(30):
        waiting.append(ask_unread(s, path, body))
        most = max(most, rss(s))
    got = []
    for one in statuses(waiting):
        got.append(one)
        most = max(most, rss(s))
    assert {status for status, _ in got} == {200, 503}, got
    assert all(again == (status == 503) for status, again in got), got
    assert s.metric("client_buffer_limit_bytes") == BUDGET
    assert s.metric("client_buffer_bytes") > MIB
    assert most - before < MOST_RSS, f"{(most - before) / MIB:.0f} MiB"
    for one in waiting:
        one.close()
    s.wait_metric("client_buffer_bytes", 0)
    s.wait_idle()
    assert s.ask("POST", path, json=body).status_code == 200


def test_an_answer_that_outgrows_the_budget_is_given_up(start):
    """Its size is not known before: it ends with an error that says why, and others go on."""
    s = start("--client-buffer-bytes", str(BUDGET))
    r = s.ask("POST", "/v1/completions", json=dict(prompt="a", max_tokens=8000, n=64, logprobs=20, seed=1))
    assert r.status_code == 503 and "client-buffer-bytes" in r.json()["error"]["message"]
    assert int(r.headers["retry-after"]) >= 1
    s.wait_metric("client_buffer_bytes", 0)
    s.wait_idle()


def test_bodies_count(start):
    """Requests that are being sent hold bytes too."""
    s = start("--client-buffer-bytes", str(4 * MIB), "--max-body-bytes", str(8 * MIB))
    data = json.dumps(dict(prompt="a" * (6 * MIB), max_tokens=1)).encode()
    with s.connect() as one:
        one.sendall(post("/v1/completions", data))
        status, headers, body = Reader(one).answer()
    assert status == 503 and "retry-after" in headers and b"client-buffer-bytes" in body
    s.wait_metric("client_buffer_bytes", 0)


def test_what_cannot_fit_is_refused_before_it_is_computed(server):
    before = server.metric("prompt_tokens_total")
    r = server.ask("POST", "/v1/completions",
                   json=dict(prompt="a" * 30000, max_tokens=1, n=128, echo=True, logprobs=20))
    assert r.status_code == 400 and r.json()["error"]["param"] == "n"
    r = server.ask("POST", "/v1/completions",
                   json=dict(prompt="a", max_tokens=30000, n=128, logprobs=20, ignore_eos=True))
    assert r.status_code == 400 and r.json()["error"]["param"] == "n"
    assert server.metric("prompt_tokens_total") == before
