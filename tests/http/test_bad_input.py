"""Inputs that have hung or crashed other servers: each is refused with its status, and the engine goes on without leaking blocks.

One row per input: its name, the body (a dictionary, or raw bytes), the status, and the field that the error names, if any.
Below them, clients that disconnect: in the queue, in prefill, while decoding, in a beam search, swapped out.
"""
import json
import socket
import struct
import time

import pytest

from conftest import PATIENCE_S
from raw import Reader, error_of, post

HUGE = 2 ** 63
DEEP = b"[" * 100_000 + b"]" * 100_000


def raw(text, **values):
    """JSON that no dictionary can express: `text` with @ for the value."""
    return b'{"prompt":"x","max_tokens":1,' + text.encode() + b"}"


COMPLETIONS = [
    # ids that are not in the vocabulary (256 ids here)
    ("an id past the vocabulary", dict(prompt=[1, 256]), 400, "prompt"),
    ("a negative id", dict(prompt=[-1]), 400, "prompt"),
    ("an id past 32 bits", dict(prompt=[2 ** 32 + 1]), 400, "prompt"),
    ("an id past 64 bits", dict(prompt=[2 ** 64]), 400, "prompt"),
    ("an id that is no integer", dict(prompt=[1.5]), 400, "prompt"),
    ("true as an id", dict(prompt=[True]), 400, "prompt"),
    ("ids and texts mixed", dict(prompt=[1, "x"]), 400, "prompt"),
    ("lists of lists of lists", dict(prompt=[[[1]]]), 400, "prompt"),
    ("a stop id past the vocabulary", dict(prompt="x", stop_token_ids=[256]), 400, "stop_token_ids"),
    ("a bias past the vocabulary", dict(prompt="x", logit_bias={"256": 1}), 400, "logit_bias"),
    ("a bias of a negative id", dict(prompt="x", logit_bias={"-1": 1}), 400, "logit_bias"),
    ("a bias of no id", dict(prompt="x", logit_bias={"1e1": 1}), 400, "logit_bias"),
    ("a bias beyond its bounds", dict(prompt="x", logit_bias={"1": 1e30}), 400, "logit_bias"),
    ("an allowed id past the vocabulary", dict(prompt="x", allowed_token_ids=[256]), 400, "allowed_token_ids"),
    ("no allowed id at all", dict(prompt="x", allowed_token_ids=[]), 400, "allowed_token_ids"),
    # counts, negative and huge
    *((f"{field} {value}", {"prompt": "x", field: value}, 400, field) for field, values in {
        "max_tokens": (-1, 0, 2 ** 31, HUGE, 40_000), "min_tokens": (-1, 17, HUGE), "n": (0, -1, 129, HUGE),
        "best_of": (0, -1, 129), "logprobs": (-1, 21, HUGE), "prompt_logprobs": (-1, 21), "top_k": (-2, 1.5),
        "truncate_prompt_tokens": (-1, 0, HUGE), "seed": (2 ** 64, -HUGE - 1, 1.5), "priority": (HUGE, -HUGE),
        "beam_width": (0, -1, 129)}.items() for value in values),
    ("more sequences than may run", dict(prompt="x", n=128, max_tokens=30_000, prompt_logprobs=1, echo=True), 400, None),
    ("prompts times n without bound", dict(prompt=["x"] * 1024, n=128), 400, "n"),
    ("more prompts than a request may have", dict(prompt=["x"] * 1025), 400, "prompt"),
    ("a prompt longer than the model", dict(prompt="x" * 100_000), 400, "prompt"),
    ("no prompt in a list", dict(prompt=[]), 400, "prompt"),
    ("an empty prompt among others", dict(prompt=["x", ""]), 400, "prompt"),
    # invalid numbers
    ("NaN", raw('"temperature":NaN'), 400, None),
    ("Infinity", raw('"temperature":Infinity'), 400, None),
    ("-Infinity in a bias", raw('"logit_bias":{"1":-Infinity}'), 400, None),
    ("a number past a double", raw('"temperature":1e999'), 400, None),
    ("a repetition penalty past a float", raw('"repetition_penalty":1e300'), 400, "repetition_penalty"),
    ("a length penalty past a float", raw('"use_beam_search":true,"length_penalty":1e300'), 400, "length_penalty"),
    ("a number of a million digits", raw('"temperature":' + "1" * 1_000_000), 400, "temperature"),
    ("an integer of a million digits", raw('"max_tokens":' + "1" * 1_000_000), 400, "max_tokens"),
    ("a fraction behind 100,000 zeros", raw('"max_tokens":0.' + "0" * 100_000 + "1"), 400, "max_tokens"),
    ("an integer and a fraction below a double's", raw('"n":1.00000000000000000000000000001'), 400, "n"),
    ("a seed over 64 bits", raw('"seed":18446744073709551616'), 400, "seed"),
    ("a seed with a fraction below a double's", raw('"seed":9007199254740993.5'), 400, "seed"),
    ("a float beyond doubles", raw('"temperature":1e400'), 400, "temperature"),
    ("an integer beyond doubles", raw('"top_k":1e400'), 400, "top_k"),
    ("an integer below doubles", raw('"top_k":1e-400'), 400, "top_k"),
    ("hexadecimal", raw('"temperature":0x1'), 400, None),
    ("a penalty of zero", dict(prompt="x", repetition_penalty=0), 400, "repetition_penalty"),
    ("a temperature below zero", dict(prompt="x", temperature=-0.1), 400, "temperature"),
    ("top_p of zero", dict(prompt="x", top_p=0), 400, "top_p"),
    # JSON itself
    ("no body", b"", 400, None),
    ("a body of blanks", b" " * 100_000, 400, None),
    ("half a body", b'{"prompt":"x"', 400, None),
    ("something after the body", b'{"prompt":"x"} {}', 400, None),
    ("no object", b'"prompt"', 400, None),
    ("brackets without end", DEEP, 400, None),
    ("a prompt of brackets", b'{"prompt":' + DEEP + b"}", 400, None),
    ("objects without end", b'{"a":' * 50_000 + b"1" + b"}" * 50_000, 400, None),
    ("a field given twice", b'{"prompt":"x","n":1,"n":2}', 400, "n"),
    ("the prompt given twice", b'{"prompt":"x","prompt":[256]}', 400, "prompt"),
    ("a member given twice", b'{"prompt":"x","response_format":{"type":"text","type":"json_object"}}', 400, "response_format"),
    ("a member given twice among many", b'{"prompt":"x","logit_bias":{' + b",".join(b'"%d":1' % (i % 200) for i in range(201)) + b"}}",
     400, "logit_bias"),
    ("more fields than anyone needs", json.dumps({f"f{i}": 0 for i in range(1000)}).encode(), 400, None),
    ("a million values", b'{"prompt":"x","y":[' + b"0," * 1_100_000 + b"0]}", 400, None),
    # texts
    ("invalid UTF-8", b'{"prompt":"\xff"}', 400, None),
    ("overlong UTF-8", b'{"prompt":"\xc0\x80"}', 400, None),
    ("a surrogate in UTF-8", b'{"prompt":"\xed\xa0\x80"}', 400, None),
    ("a lone surrogate", b'{"prompt":"\\ud800"}', 400, None),
    ("surrogates the wrong way round", b'{"prompt":"\\udc00\\ud800"}', 400, None),
    ("half an escape", b'{"prompt":"\\u00"}', 400, None),
    ("a NUL byte", b'{"prompt":"a\x00b"}', 400, None),
    ("an escaped NUL in a field's name", b'{"prompt":"x","a\\u0000b":1}', 400, None),
    ("an escaped NUL in a request's id", b'{"prompt":"x","request_id":"a\\u0000b"}', 400, "request_id"),
    ("an escaped NUL in a salt", b'{"prompt":"x","cache_salt":"a\\u0000b"}', 400, "cache_salt"),
    ("an escaped NUL in the model's name", b'{"prompt":"x","model":"null\\u0000"}', 400, "model"),
    # lists that make every token expensive
    ("seventeen stops", dict(prompt="x", stop=[str(i) for i in range(17)]), 400, "stop"),
    ("a hundred thousand stops", dict(prompt="x", stop=["y"] * 100_000), 400, "stop"),
    ("a stop of a megabyte", dict(prompt="x", stop="y" * 1_000_000), 400, "stop"),
    ("an empty stop", dict(prompt="x", stop=[""]), 400, "stop"),
    ("a thousand stop ids", dict(prompt="x", stop_token_ids=[1] * 1000), 400, "stop_token_ids"),
    ("a thousand bad words", dict(prompt="x", bad_words=["y"] * 1000), 400, "bad_words"),
    ("an empty bad word", dict(prompt="x", bad_words=[""]), 400, "bad_words"),
    ("a bad word of many tokens", dict(prompt="x", bad_words=["y" * 1000]), 400, "bad_words"),
    ("more biases than there may be", dict(prompt="x", logit_bias={str(i): 1 for i in range(2000)}), 400, "logit_bias"),
    # what would be compiled or run here
    ("a regular expression", dict(prompt="x", guided_regex="(a+)+" * 1000 + "("), 400, "guided_regex"),
    ("a grammar without end", dict(prompt="x", guided_grammar="root ::= root root"), 400, "guided_grammar"),
    ("a schema that holds itself", dict(prompt="x", guided_json={"$ref": "#"}), 400, "guided_json"),
    ("a schema as a format", dict(prompt="x", response_format={"type": "json_schema", "json_schema": {"$ref": "#"}}), 400,
     "response_format"),
    ("embeddings instead of a prompt", dict(prompt="x", prompt_embeds="AAAA"), 400, "prompt_embeds"),
    # contradicting fields
    ("many equal answers", dict(prompt="x", n=4, temperature=0), 400, "n"),
    ("the best of a stream", dict(prompt="x", best_of=4, stream=True), 400, "best_of"),
    ("beams that are sampled", dict(prompt="x", use_beam_search=True, n=2, temperature=1), 400, "temperature"),
    ("options of no stream", dict(prompt="x", stream_options={"include_usage": True}), 400, "stream_options"),
    ("another model", dict(model="../../etc/passwd", prompt="x"), 404, "model"),
    ("a request id with a line end", dict(prompt="x", request_id="a\r\nSet-Cookie: b"), 400, "request_id"),
    ("a salt without end", dict(prompt="x", cache_salt="y" * 100_000), 400, "cache_salt"),
]

OTHERS = [
    ("/v1/chat/completions", dict(messages=[{"role": "user", "content": "x"}], chat_template="{% for i in range(10**12) %}{% endfor %}"),
     400, "chat_template"),
    ("/v1/chat/completions", dict(messages=[]), 400, None),
    ("/v1/chat/completions", dict(messages=[{"role": "user"}] * 100_000), 400, None),
    ("/v1/chat/completions", dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]),
     400, None),
    ("/tokenize", dict(prompt=5), 400, "prompt"),
    ("/detokenize", dict(tokens=[256]), 400, "tokens"),
    ("/detokenize", dict(tokens=[-1]), 400, "tokens"),
    ("/detokenize", dict(tokens="x"), 400, "tokens"),
    ("/detokenize", b'{"tokens":' + DEEP + b"}", 400, None),
]


def still_serves(server):
    a = server.ask("POST", "/v1/completions", json=dict(prompt="x", max_tokens=2))
    assert a.status_code == 200 and server.ask("GET", "/health").status_code == 200


def refused(server, path, body, status, param):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    a = server.ask("POST", path, content=data, headers={"Content-Type": "application/json"})
    assert a.status_code == status, a.text
    error = error_of(a.content)
    if param:
        assert error["param"] == param, error
    assert len(error["message"]) < 1000 and "/work" not in error["message"]
    still_serves(server)


@pytest.mark.parametrize("body, status, param", [row[1:] for row in COMPLETIONS], ids=[row[0] for row in COMPLETIONS])
def test_refused(server, body, status, param):
    refused(server, "/v1/completions", body, status, param)


@pytest.mark.parametrize("path, body, status, param", OTHERS)
def test_refused_elsewhere(server, path, body, status, param):
    refused(server, path, body, status, param)


# ---- clients that leave ----

# When: flags of the server, the number of clients and their request, and the metric that tells when to disconnect.
LEAVING = {
    "in the queue": (["--max-num-seqs", "1"], 4, dict(prompt="x", max_tokens=30_000), ("num_requests_waiting", 3)),
    "in prefill": (["--max-num-batched-tokens", "64", "--max-num-seqs", "4"], 2, dict(prompt=[1] * 30_000, max_tokens=2),
                   ("num_requests_running", 1)),
    "while decoding": ([], 4, dict(prompt="x", max_tokens=30_000, n=2, temperature=1), ("num_requests_running", 8)),
    "in a beam search": ([], 4, dict(prompt="x", max_tokens=2000, use_beam_search=True, n=3, stream=False),
                         ("num_requests_running", 12)),
    "swapped out": (["--kv-blocks", "64", "--max-model-len", "1000", "--swap-space", "1GiB", "--preemption", "swap"], 6,
                    dict(prompt=[1] * 100, max_tokens=800), ("num_preemptions_total", 1)),
}


def at_least(server, metric, value):
    end = time.monotonic() + PATIENCE_S
    while server.metric(metric) < value:
        assert time.monotonic() < end, f"{metric} is {server.metric(metric)}, not {value}"
        time.sleep(0.02)


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("when", LEAVING)
def test_who_leaves_takes_nothing_along(start, when, reset):
    flags, n, ask, (metric, value) = LEAVING[when]
    # A step lasts 5 ms, so thousands of tokens are still to come when the metric is seen.
    s = start(*flags, model="null:5000")
    clients = [s.connect() for _ in range(n)]
    for c in clients:
        c.sendall(post("/v1/completions", {"ignore_eos": True, "stream": True, **ask}))
    at_least(s, metric, value)
    for c in clients:
        if reset:
            c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        c.close()
    s.wait_idle()
    still_serves(s)


def test_who_sends_on_while_it_is_answered(start):
    """Streams pipelined after one that does not end; then the client disconnects."""
    s = start(model="null:5000")
    with s.connect() as c:
        c.sendall(post("/v1/completions", dict(prompt="x", max_tokens=30_000, stream=True, ignore_eos=True)) * 50)
        assert Reader(c).head()[0] == 200
        at_least(s, "num_requests_running", 1)
    s.wait_idle()
    still_serves(s)
