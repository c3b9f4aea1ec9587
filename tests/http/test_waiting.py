"""The memory of requests that wait in the queue, and of those that do not fit into it."""
import contextlib
import json
import re

import pytest

from conftest import PACED
from raw import post

# Occupies every place in the batch for more than a minute with the delayed model.
BLOCKER = dict(prompt="x", n=128, max_tokens=8000, ignore_eos=True)
MOST_BYTES = 64 << 20

# For each: a body, the number of copies, the prompts of one.
SHAPES = {
    "n with a penalty": (dict(prompt=["x"] * 64, n=64, max_tokens=400, repetition_penalty=1.1), 15, 64),
    "samples to be collected": (dict(prompt=["x"] * 32, n=128, max_tokens=400), 31, 32),
    "beams": (dict(prompt=["x"] * 32, n=128, use_beam_search=True, max_tokens=500, logprobs=20), 31, 32),
    "echo with log-probabilities": (
        dict(prompt=["x" * 4000] * 32, n=8, max_tokens=8, echo=True, logprobs=20, stream=True), 31, 32),
    "stop strings": (dict(prompt=["x"] * 32, n=16, stop=["y" * 1024] * 16), 31, 32),
}


def resident(server, which="VmRSS"):
    status = open(f"/proc/{server.process.pid}/status").read()
    return int(re.search(which + r":\s+(\d+) kB", status)[1]) * 1024


@pytest.mark.parametrize("shape", SHAPES)
def test_waiting_requests_hold_little(start, shape):
    body, n, prompts = SHAPES[shape]
    s = start("--max-num-seqs", "128", model=PACED)
    data = json.dumps(body).encode()
    ids = sum(map(len, body["prompt"])) * 4
    with contextlib.ExitStack() as stack:
        blocker = stack.enter_context(s.connect())
        blocker.sendall(post("/v1/completions", BLOCKER))
        s.wait_metric("num_requests_running", 128)
        before = resident(s)
        for _ in range(n):
            c = stack.enter_context(s.connect())
            c.sendall(post("/v1/completions", data))
        s.wait_metric("num_requests_waiting", n * prompts)
        more = resident(s) - before - n * (len(data) + ids)
        assert more <= MOST_BYTES, f"{more >> 20} MiB"
    s.wait_idle()


def test_prompts_share_long_lists(start):
    """A list shared by a thousand prompts exists once in memory, even while the body is parsed."""
    s = start("--max-num-seqs", "128", model=PACED)
    body = dict(prompt=["x"] * 1024, allowed_token_ids=[65] * 65536, max_tokens=1)
    with s.connect() as blocker, s.connect() as c:
        blocker.sendall(post("/v1/completions", BLOCKER))
        s.wait_metric("num_requests_running", 128)
        before = resident(s, "VmHWM")
        c.sendall(post("/v1/completions", body))
        s.wait_metric("num_requests_waiting", 1024)
        more = resident(s, "VmHWM") - before
        assert more <= MOST_BYTES, f"{more >> 20} MiB"
    s.wait_idle()


def test_a_full_queue_is_told_before_the_body_is_read(start):
    s = start("--max-num-seqs", "1", "--max-queue", "4", model=PACED)
    with s.connect() as running, s.connect() as waiting:
        running.sendall(post("/v1/completions", dict(BLOCKER, n=1)))
        s.wait_metric("num_requests_running", 1)
        waiting.sendall(post("/v1/completions", dict(BLOCKER, n=1, prompt=["x"] * 3)))
        s.wait_metric("num_requests_waiting", 3)
        # One place is free: only the number of prompts is checked, not their contents.
        a = s.ask("POST", "/v1/completions", json=dict(prompt=[[-1], [-1]]))
        assert a.status_code == 429 and int(a.headers["retry-after"]) >= 1
        a = s.ask("POST", "/v1/completions", json=dict(prompt=[[-1]] * 5))
        assert a.status_code == 400 and "max-queue 4" in a.json()["error"]["message"]
        assert s.ask("POST", "/v1/completions", json=dict(prompt=[-1])).status_code == 400
        with s.connect() as last:
            last.sendall(post("/v1/completions", dict(BLOCKER, n=1)))
            s.wait_metric("num_requests_waiting", 4)
            for path in "/v1/completions", "/v1/chat/completions":
                a = s.ask("POST", path, content=b"{" * 100000)
                assert a.status_code == 429 and int(a.headers["retry-after"]) >= 1
                assert a.json()["error"]["type"] == "rate_limit_error"
    s.wait_idle()
