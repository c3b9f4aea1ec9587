"""Answers that take long to render: they are correct, and other streams go on meanwhile."""
import json
import threading

import pytest

from raw import Reader, post

VICTIM = dict(prompt="x", max_tokens=1500, seed=3, stream=True, ignore_eos=True)

LONG = {
    "echo": dict(prompt="abcd" * 500, max_tokens=3, n=16, echo=True, logprobs=20, seed=1),
    "prompt_logprobs": dict(prompt="abcd" * 300, max_tokens=3, n=4, prompt_logprobs=5, seed=1),
    "ids": dict(prompt="abcd" * 2000, max_tokens=3, n=16, return_token_ids=True, seed=1),
    "everything": dict(prompt=["abcd" * 50, "é\n" * 50], max_tokens=20, n=8, echo=True, logprobs=20, prompt_logprobs=3,
                       return_token_ids=True, seed=1),
    "choices": dict(prompt="a", max_tokens=200, n=64, logprobs=20, seed=1),
    "beams": dict(prompt="a", max_tokens=150, n=32, best_of=32, use_beam_search=True, logprobs=20, temperature=0, seed=1),
    "beams, one": dict(prompt="a", max_tokens=300, n=1, best_of=64, use_beam_search=True, logprobs=5, temperature=0, seed=1),
    "echo alone": dict(prompt="ab\u00e9\u20ac" * 1000, max_tokens=0, n=8, echo=True, seed=1),
}
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def streamed(server, body):
    """The joined choices of a streamed answer, and its chunks."""
    choices = {}
    with server.connect() as s:
        s.sendall(post("/v1/completions", dict(body, stream=True)))
        r = Reader(s)
        status, _ = r.head()
        assert status == 200
        text = b"".join(r.chunks())
    lines = [line for line in text.split(b"\n\n") if line]
    assert lines[-1] == b"data: [DONE]"
    for line in lines[:-1]:
        for c in json.loads(line.removeprefix(b"data: "))["choices"]:
            put(choices.setdefault(c["index"], {}), c)
    return [choices[i] for i in sorted(choices)]


def put(whole, c):
    whole["text"] = whole.get("text", "") + c["text"]
    for name in ("token_ids", "prompt_logprobs"):
        if name in c:
            whole.setdefault(name, []).extend(c[name])
    if "prompt_token_ids" in c:
        assert "prompt_token_ids" not in whole
        whole["prompt_token_ids"] = c["prompt_token_ids"]
    for name in LISTS:
        if c["logprobs"]:
            whole.setdefault(name, []).extend(c["logprobs"][name])
    whole["finish"] = whole.get("finish") or c["finish_reason"]


def collected(server, body):
    r = server.ask("POST", "/v1/completions", json=body)
    assert r.status_code == 200, r.text
    choices = []
    for c in r.json()["choices"]:
        put(whole := {}, c)
        choices.append(whole)
    return choices, r.json()["usage"]


@pytest.mark.parametrize("name", LONG)
def test_streamed_and_whole_answers_say_the_same(server, name):
    body = LONG[name]
    whole, usage = collected(server, body)
    assert streamed(server, body) == whole
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    assert len(whole) == body["n"] * len(prompts)
    assert usage["prompt_tokens"] == sum(len(p.encode()) for p in prompts)
    for i, c in enumerate(whole):
        prompt = prompts[i // body["n"]]
        n_echo = len(prompt.encode()) if body.get("echo") else 0
        if body.get("echo"):
            assert c["text"].startswith(prompt)
        if body.get("return_token_ids"):
            assert c["prompt_token_ids"] == list(prompt.encode())
        if body.get("prompt_logprobs"):
            assert len(c["prompt_logprobs"]) == len(prompt.encode())
        if body.get("logprobs") and not body.get("use_beam_search"):
            assert len(c["tokens"]) == len(c["text_offset"]) == len(c["top_logprobs"]) == n_echo + body["max_tokens"]


@pytest.mark.parametrize("name", LONG)
def test_a_stream_goes_on_beside_a_long_answer(delayed_fast, name):
    alone = streamed(delayed_fast, VICTIM)
    got = []
    beside = threading.Thread(target=lambda: got.append(streamed(delayed_fast, VICTIM)))
    beside.start()
    whole, _ = collected(delayed_fast, LONG[name])
    assert streamed(delayed_fast, LONG[name]) == whole
    beside.join()
    assert got == [alone]


@pytest.fixture(scope="module")
def delayed_fast():
    from conftest import serving
    with serving(model="null:200") as s:
        yield s
        s.wait_metric("client_buffer_bytes", 0)


def test_a_long_answer_to_many_who_leave(server):
    """Partly rendered output is dropped."""
    for name in LONG:
        for n in (0, 100, 100000):
            with server.connect() as s:
                s.sendall(post("/v1/completions", dict(LONG[name], stream=True), "Connection: close"))
                seen = 0
                while seen < n and (data := s.recv(65536)):
                    seen += len(data)
    server.wait_metric("client_buffer_bytes", 0)
    server.wait_idle()


def test_many_wide_requests_that_end_at_once_are_all_answered(start):
    """The ends of groups are delivered in portions. An end needs less than was reserved for it if
    its choices have ended before, and nothing may follow the last one."""
    server = start(model="null:1000")
    body = dict(prompt=["x"] * 64, n=64, max_tokens=8000, stop_token_ids=list(range(97, 123)))
    done = []

    def ask():
        done.append(len(collected(server, body)[0]))

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert done == [64 * 64] * 12
