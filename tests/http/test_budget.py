"""The memory for answers that clients do not read is bounded (client-buffer-bytes), and is freed when they disconnect."""
import json
import socket

import pytest

from conftest import PATIENCE_S
from raw import Reader, post

MIB = 1 << 20
BUDGET = 64 * MIB
# Far below the size of the answers, far above the budget and the server's other memory, even with a sanitizer.
MOST_RSS = 500 * MIB


def rss(server):
    pages = int(open(f"/proc/{server.process.pid}/statm").read().split()[1])
    return pages * 4096


def ask_unread(server, path, body):
    """A request with an answer that stays in the server, except for what a small socket buffer takes."""
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    s.settimeout(PATIENCE_S)
    s.connect((server.host, server.port))
    s.sendall(post(path, body))
    return s


def statuses(sockets):
    """The status of each answer, and whether it has Retry-After."""
    for s in sockets:
        status, headers = Reader(s).head()
        yield status, "retry-after" in headers


ANSWERS = {
    # 24 MiB of JSON, most of it known before it is computed.
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
    got, held = [], 0
    for one in statuses(waiting):
        got.append(one)
        most = max(most, rss(s))
        # Looked at each time: a client that takes nothing for a minute is cut off.
        held = max(held, s.metric("client_buffer_bytes"))
    assert {status for status, _ in got} == {200, 503}, got
    assert all(again == (status == 503) for status, again in got), got
    assert s.metric("client_buffer_limit_bytes") == BUDGET
    assert held > MIB
    assert most - before < MOST_RSS, f"{(most - before) / MIB:.0f} MiB"
    for one in waiting:
        one.close()
    s.wait_metric("client_buffer_bytes", 0)
    s.wait_idle()
    assert s.ask("POST", path, json=body).status_code == 200


def test_an_answer_that_outgrows_the_budget_is_given_up(start):
    """The size of the answer is not known before: it ends with an error, and others go on."""
    s = start("--client-buffer-bytes", str(BUDGET))
    r = s.ask("POST", "/v1/completions", json=dict(prompt="a", max_tokens=8000, n=64, logprobs=20, seed=1))
    assert r.status_code == 503 and "client-buffer-bytes" in r.json()["error"]["message"]
    assert int(r.headers["retry-after"]) >= 1
    s.wait_metric("client_buffer_bytes", 0)
    s.wait_idle()


def test_bodies_count(start):
    """Request bodies being received count, too."""
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
