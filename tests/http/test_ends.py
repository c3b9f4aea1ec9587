"""How choices end: stops of beams, choices that cannot go on, prompts alone; and the offsets of tokens in the text."""
import json
import os

import httpx
import pytest

from conftest import PATIENCE_S, ROOT, serving
from raw import error_of, events

BEAMS = dict(prompt="Once upon a time, there was a cat", use_beam_search=True, beam_width=4, max_tokens=24,
             length_penalty=-2)  # of hypotheses on one path the one that ends first is the best


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as c:
        yield c


@pytest.fixture(scope="module")
def demo():
    with serving("--device", "cpu", "--kv-cache-memory", "64MiB", "--deterministic",
                 model=os.path.join(ROOT, "models", "demo")) as s:
        with httpx.Client(base_url=s.url, timeout=PATIENCE_S) as c:
            yield c


def complete(http, **body):
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def stream(http, **body):
    """The choices according to their events."""
    answer = http.post("/v1/completions", json=dict(body, stream=True))
    assert answer.status_code == 200, answer.text
    choices = {}
    for e in events(answer.content)[:-1]:
        for piece in json.loads(e)["choices"]:
            c = choices.setdefault(piece["index"], dict(index=piece["index"], text="", logprobs=None))
            assert "finish_reason" not in c or c["finish_reason"] is None
            c["text"] += piece.pop("text")
            if "token_ids" in piece:
                c["token_ids"] = c.get("token_ids", []) + piece.pop("token_ids")
            for name, values in (piece.pop("logprobs") or {}).items():
                c["logprobs"] = c["logprobs"] or {}
                c["logprobs"][name] = c["logprobs"].get(name, []) + values
            c.update(piece)
    return [choices[i] for i in sorted(choices)]


def both(http, **body):
    """A request's choices, which must be the same with and without stream."""
    choices = complete(http, **body)
    assert stream(http, **body) == choices
    return choices


@pytest.mark.parametrize("n", [1, 2])
def test_a_stop_string_of_beams(demo, n):
    text = complete(demo, **BEAMS)[0]["text"]
    stop = text[len(text) // 3:][:13]
    for kept in ("", stop):
        best = both(demo, **BEAMS, n=n, stop=stop, include_stop_str_in_output=kept != "")[0]
        assert (best["text"], best["finish_reason"], best["stop_reason"]) == (text[:text.index(stop)] + kept, "stop", stop)


def test_a_stop_id_of_beams(demo):
    ids = complete(demo, **BEAMS, return_token_ids=True)[0]["token_ids"]
    stop = next(id for i, id in enumerate(ids) if i >= 5 and id not in ids[:i])
    ask = dict(BEAMS, stop_token_ids=[stop], logprobs=0, return_token_ids=True)
    best = {}
    for n in (1, 2):
        plain = both(demo, **ask, n=n)[0]
        shown = both(demo, **ask, n=n, include_stop_str_in_output=True)[0]
        at = plain["logprobs"]["text_offset"][-1]
        assert plain["token_ids"] == shown["token_ids"] and plain["token_ids"][-1] == stop
        assert (plain["finish_reason"], plain["stop_reason"]) == ("stop", stop)
        assert plain["text"] == shown["text"][:at] and len(plain["text"]) == at < len(shown["text"])
        best[n] = plain["text"], shown["text"], plain["token_ids"]
    assert best[1] == best[2]


@pytest.mark.parametrize("fields", [dict(n=1), dict(n=2), dict(n=3)])
def test_the_end_of_sequence_of_beams(demo, fields):
    ask = dict(BEAMS, **fields, skip_special_tokens=False, logit_bias={"1": 20})
    for c in both(demo, **ask):
        assert c["finish_reason"] == "stop" and c["stop_reason"] is None and "</s>" not in c["text"]
    for c in both(demo, **ask, include_stop_str_in_output=True):
        assert c["text"].endswith("</s>")


METHODS = [dict(), dict(n=3, temperature=1), dict(n=1, best_of=4, temperature=1), dict(n=2, best_of=4, temperature=1),
           dict(use_beam_search=True, beam_width=64), dict(use_beam_search=True, n=5, beam_width=5)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scores", [dict(), dict(logprobs=2), dict(prompt_logprobs=1)])
def test_a_prompt_alone_ends_at_once(server, http, method, scores):
    ask = dict(prompt=["ab", "x" * 700], echo=True, max_tokens=0, **method, **scores)
    n = method.get("n", 1)
    for choices in (complete(http, **ask), stream(http, **ask) if method.get("best_of", n) == n else []):
        for i, c in enumerate(choices):
            assert (c["index"], c["text"], c["finish_reason"]) == (i, ask["prompt"][i // n], "length")
            assert not scores.get("logprobs") or c["logprobs"]["text_offset"] == list(range(len(c["text"])))
            assert "prompt_logprobs" not in scores or len(c["prompt_logprobs"]) == len(c["text"])
    server.wait_idle()


@pytest.mark.parametrize("body, param", [
    (dict(allowed_token_ids=[97], bad_words=["a"]), "allowed_token_ids"),
    (dict(allowed_token_ids=[97, 98], stop_token_ids=[97, 98], min_tokens=1), "allowed_token_ids"),
    (dict(allowed_token_ids=[97, 98], stop_token_ids=[97], min_tokens=1, bad_words=["b"]), "allowed_token_ids"),
    (dict(repetition_penalty=1e-38), "repetition_penalty"), (dict(repetition_penalty=1e38), "repetition_penalty"),
])
@pytest.mark.parametrize("method", [dict(), dict(use_beam_search=True, beam_width=3)])
def test_what_is_impossible_from_the_start_is_refused(http, body, param, method):
    answer = http.post("/v1/completions", json=dict(prompt="x", max_tokens=4, **body, **method))
    error = error_of(answer.content)
    assert answer.status_code == error["code"] == 400 and error["param"] == param


def test_a_choice_that_cannot_go_on_ends_alone(http):
    """After an "a" no token is allowed."""
    ask = dict(prompt=["x", "y"], n=16, seed=1, max_tokens=3, allowed_token_ids=[97, 98, 99], bad_words=["aa", "ab", "ac"])
    choices = both(http, **ask)
    for c in choices:
        dead = "a" in c["text"] and len(c["text"]) < 3
        assert c["text"].find("a") in (-1, len(c["text"]) - 1)
        assert c["finish_reason"] == ("error" if dead else "length")
        assert ("error" in c) == dead
        if dead:
            error = c["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error" and error["code"] == 400 and "bad_words" in error["message"]
    assert {c["finish_reason"] for c in choices} == {"error", "length"}


def test_a_choice_that_cannot_go_on_is_no_best_one(http):
    ask = dict(prompt="x", seed=1, max_tokens=3, allowed_token_ids=[97, 98, 99], bad_words=["aa", "ab", "ac"])
    assert [c["finish_reason"] for c in complete(http, **ask, n=2, best_of=32)] == ["length"] * 2


def test_beams_that_cannot_go_on(demo):
    """After one character no token is allowed; after the other one both are."""
    def tokens(text):
        return demo.post("/tokenize", json=dict(prompt=text, add_special_tokens=False)).json()["tokens"]

    a, b = [c for c in "0123456789?!" if len(tokens(c)) == 1 and tokens(c + c) == tokens(c) * 2][:2]
    assert tokens(a + b) == tokens(a) + tokens(b)
    ask = dict(prompt="x", use_beam_search=True, beam_width=2, n=2, max_tokens=3, bad_words=[a + a, a + b])
    for c in both(demo, **ask, allowed_token_ids=tokens(a)):
        assert (c["text"], c["finish_reason"], c["error"]["code"]) == (a, "error", 400)
    for c in both(demo, **ask, allowed_token_ids=tokens(a) + tokens(b)):
        assert len(c["text"]) == 3 and a not in c["text"][:2] and c["finish_reason"] == "length" and "error" not in c


def positions(raw):
    """The text of the bytes, and for each byte the offset of its character."""
    text, at = "", []
    while len(at) < len(raw):
        left = raw[len(at):]
        whole = next((k for k in range(1, 5) if valid(left[:k])), 0)
        taken = whole or max(k for k in range(1, 5) if k == 1 or begins(left[:k]))
        at += [len(text)] * min(taken, len(left))
        text += left[:whole].decode() if whole else "\ufffd"
    return text, at


def valid(raw):
    try:
        return len(raw.decode()) == 1
    except UnicodeDecodeError:
        return False


def begins(raw):
    """Whether more bytes can complete a character."""
    try:
        raw.decode()
        return False
    except UnicodeDecodeError as e:
        return e.reason == "unexpected end of data" and e.start == 0


@pytest.mark.parametrize("allowed", [[0xe0], [0xe2, 0x82, 0xac, 0x41], [0xf0, 0x9f, 0x98, 0x80], [0xc3, 0xa9, 0xff]])
@pytest.mark.parametrize("prompt", [[0x78], [0xe2, 0x82], [0x78, 0xc3, 0xa9, 0xf0], [0xff, 0xe2]])
def test_offsets_point_into_the_text_that_is_sent(http, allowed, prompt):
    ask = dict(prompt=prompt, allowed_token_ids=allowed, seed=1, n=8, max_tokens=16, logprobs=0, return_token_ids=True)
    for c in both(http, **ask):
        assert (c["text"], c["logprobs"]["text_offset"]) == positions(bytes(c["token_ids"]))
    for c in both(http, **ask, echo=True):
        assert (c["text"], c["logprobs"]["text_offset"]) == positions(bytes(prompt + c["token_ids"]))


def test_offsets_of_a_stop_string_are_the_end_of_the_text(http):
    text = complete(http, prompt="x", seed=9, max_tokens=60)[0]["text"]
    stop = text[30:33]
    c = both(http, prompt="x", seed=9, max_tokens=60, stop=stop, logprobs=0)[0]
    end = len(c["text"])
    assert end == text.index(stop) and c["logprobs"]["text_offset"] == [min(i, end) for i in range(end + 3)]
