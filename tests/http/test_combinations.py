"""Five hundred random combinations of every field (combinations.py), and tests
that its laws detect errors.

QUIRE_COMBINATIONS and QUIRE_COMBINATIONS_SEED set their number and seed.
"""

import argparse
import asyncio
import copy
import json
import os
import random

import pytest

from combinations import play
from combo_draw import (
    CUT,
    ROUTES,
    Case,
    calls_wanted,
    constraint_of,
    draw_case,
    draw_wrong,
    dumps,
    holds,
    is_beam,
    n_of,
)
from combo_laws import Broken, check, compare, is_json
from combo_run import Answer, Bounds, Facts, Rig
from combo_servers import CONFIGS, DRAWN
from combo_shrink import simpler

RUNS = int(os.environ.get("QUIRE_COMBINATIONS", "480"))
SEED = int(os.environ.get("QUIRE_COMBINATIONS_SEED", "14"))


SERVERS = [(name, SEED) for name in CONFIGS] + [(DRAWN, SEED + i) for i in range(6)]


@pytest.mark.parametrize("config, seed", SERVERS, ids=lambda x: str(x))
def test_combinations(config, seed):
    options = argparse.Namespace(
        configs=[config],
        runs=RUNS // len(SERVERS),
        seed=seed,
        batch=None,
        url=None,
        most=1,
        shrink=True,
        bounds=Bounds(),
    )
    counts, failures = asyncio.run(play(options))
    print(f"{config}: {counts}")
    assert not failures, "\n".join(f.line() for f in failures)
    assert counts.runs == RUNS // len(SERVERS) and counts.accepted > counts.asked / 2, str(counts)
    assert counts.long > 0, str(counts)


# ---- long bodies ----

KINDS = {
    "beams": is_beam,
    "n": lambda body: n_of(body) > 1,
    "streams": lambda body: body.get("stream"),
    "several prompts": lambda body: isinstance(body.get("prompt"), list) and len(body["prompt"]) > 1,
    "grammars": constraint_of,
    "calls": calls_wanted,
    "echo": lambda body: body.get("echo"),
    "log-probabilities": lambda body: body.get("logprobs"),
    "stop strings": lambda body: body.get("stop"),
    "keys of the prefix cache": lambda body: body.get("cache_salt"),
}


@pytest.fixture(scope="module")
def drawn():
    """Cases for a server that has every route."""
    async def draw():
        rng = random.Random(SEED)
        async with Rig("swap") as rig:
            return [draw_case(rng, rig.facts) for _ in range(3000)]

    return asyncio.run(draw())


@pytest.mark.parametrize("kind", KINDS)
def test_long_bodies_have_every_feature(drawn, kind):
    """By their prompts, and by white space."""
    cases = [c for c in drawn if not c.spoiled and KINDS[kind](c.body) and c.is_long()]
    assert any(c.padding for c in cases) and any(c.body.get(CUT) and not c.padding for c in cases)
    assert any(c.clean for c in cases) or kind in ("grammars", "calls"), "none that must be answered"


def test_long_bodies_are_drawn_for_every_route(drawn):
    for route in ROUTES:
        cases = [c for c in drawn if c.route == route and c.is_long()]
        assert any(c.padding for c in cases) and any(not c.padding for c in cases), route
        assert any(c.spoiled for c in cases), route


def test_white_space_is_no_part_of_a_body(drawn):
    for case in drawn:
        if case.padding and is_json(case.text()):
            assert json.loads(case.text()) == json.loads(dumps(case.body))
            assert len(case.text()) == len(dumps(case.body)) + case.padding


# ---- the laws themselves: a correct answer, and wrong variants of it ----

ASKED = {
    "prompt": "ab",
    "max_tokens": 3,
    "stop": "zz",
    "logprobs": 1,
    "prompt_logprobs": 0,
    "echo": True,
    "seed": 1,
    "return_token_ids": True,
}
TOP = {"c": -1.0}
RIGHT = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": "m",
    "system_fingerprint": "f",
    "choices": [
        {
            "index": 0,
            "text": "abcde",
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": [99, 100, 101],
            "prompt_token_ids": [97, 98],
            "prompt_logprobs": [None, {"98": {"logprob": -1.0, "rank": 1, "decoded_token": "b"}}],
            "logprobs": {
                "tokens": list("abcde"),
                "token_logprobs": [None, -1.0, -1.0, -1.0, -1.0],
                "top_logprobs": [None] + [{c: -1.0} for c in "bcde"],
                "text_offset": [0, 1, 2, 3, 4],
            },
        }
    ],
    "usage": {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    },
}
HEADERS = {"x-request-id": "1"}


@pytest.fixture(scope="module")
def facts():
    return Facts(None)


def answer(body, status=200):
    return Answer(status, HEADERS, json.dumps(body).encode())


def kind_of(case, given, facts):
    try:
        check(case, given, facts)
    except Broken as broken:
        return broken.kind
    return None


def changed(**fields):
    body = copy.deepcopy(RIGHT)
    body["choices"][0] |= fields
    return body


def test_what_is_right_is_right(facts):
    assert kind_of(Case("/v1/completions", ASKED), answer(RIGHT), facts) is None


def test_a_stream_is_read(facts):
    choice = copy.deepcopy(RIGHT["choices"][0])
    first = choice | {
        "text": "abc",
        "finish_reason": None,
        "stop_reason": None,
        "token_ids": [99],
        "logprobs": None,
    }
    last = {
        "index": 0,
        "text": "de",
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": [100, 101],
        "logprobs": choice["logprobs"],
    }
    chunks = [dict(RIGHT, choices=[c]) for c in (first, last)]
    body = "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + ": keepalive\n\ndata: [DONE]\n\n"
    given = Answer(200, HEADERS | {"content-type": "text/event-stream"}, body.encode())
    case = Case("/v1/completions", ASKED | {"stream": True})
    outcome = check(case, given, facts)
    compare(outcome, check(Case("/v1/completions", ASKED), answer(RIGHT), facts), "streamed or not")
    given.body = body[: -len("data: [DONE]\n\n")].encode()
    assert kind_of(case, given, facts) == "a stream without [DONE]"


@pytest.mark.parametrize(
    "fields, kind",
    [
        ({"text": "abcd"}, "text is not what its token ids say"),
        ({"finish_reason": "stop"}, "text is not what its token ids say"),
        ({"finish_reason": "stop", "stop_reason": "yy"}, "a stop_reason that was not asked for"),
        ({"finish_reason": "stop", "stop_reason": 7}, "a stop token that was not asked for"),
        ({"finish_reason": "abort"}, "finish_reason"),
        ({"finish_reason": "error"}, "an error without its object"),
        ({"token_ids": [99, 100]}, "finish_reason length too early"),
        ({"token_ids": [99, 100, 101, 102]}, "more tokens than max_tokens"),
        ({"prompt_logprobs": [None]}, "prompt_logprobs of another length"),
        (
            {"logprobs": RIGHT["choices"][0]["logprobs"] | {"text_offset": [0, 1, 2, 3, 6]}},
            "text_offset",
        ),
        (
            {"logprobs": RIGHT["choices"][0]["logprobs"] | {"text_offset": [0, 1, 2, 3]}},
            "logprobs of unequal length",
        ),
        (
            {
                "logprobs": RIGHT["choices"][0]["logprobs"]
                | {"token_logprobs": [None, -1, 1.5, -1, -1]}
            },
            "a log-probability that is none",
        ),
    ],
)
def test_what_is_wrong_is_seen(facts, fields, kind):
    case = Case(
        "/v1/completions", {k: v for k, v in ASKED.items() if k != "stop" or "yy" in str(fields)}
    )
    if fields.get("finish_reason") == "stop" and "stop_reason" not in fields:
        facts.eos = [101]
    try:
        assert kind_of(case, answer(changed(**fields)), facts) == kind
    finally:
        facts.eos = []


def test_a_stop_string_that_stays_is_seen(facts):
    case = Case("/v1/completions", {"prompt": "ab", "stop": "d", "max_tokens": 3})
    choice = {
        "index": 0,
        "text": "cde",
        "finish_reason": "length",
        "stop_reason": None,
        "logprobs": None,
    }
    assert (
        kind_of(case, answer(RIGHT | {"choices": [choice]}), facts) == "a stop string in the text"
    )


@pytest.mark.parametrize(
    "given, kind",
    [
        (Answer(late=True), "hang"),
        (Answer(cut=True), "connection cut"),
        (Answer(500, HEADERS, b"{}"), "500"),
        (Answer(400, HEADERS, b'{"error":"x"}'), "an error of another shape"),
        (Answer(200, {}, b"{}"), "no X-Request-Id"),
        (
            Answer(429, HEADERS, b'{"error":{"message":"m","type":"t","param":null,"code":429}}'),
            "no Retry-After",
        ),
        (
            Answer(400, HEADERS, b'{"error":{"message":"m","type":"t","param":null,"code":400}}'),
            "a 400 that names no field",
        ),
        (Answer(200, HEADERS, b'{"choices":NaN}'), "not JSON"),
    ],
)
def test_what_must_not_be_answered(facts, given, kind):
    assert kind_of(Case("/v1/completions", ASKED), given, facts) == kind


def test_a_wrong_value_must_be_refused_by_its_name(facts):
    case = Case("/v1/completions", ASKED, spoiled="seed")
    assert kind_of(case, answer(RIGHT), facts) == "accepted"
    refusal = {"error": {"message": "m", "type": "t", "param": "n", "code": 400}}
    assert kind_of(case, answer(refusal, 400), facts) == "a 400 that names another field"
    assert (
        kind_of(Case("/v1/completions", ASKED, clean=True), answer(refusal, 400), facts)
        == "refused"
    )


def test_equal_samples_without_a_seed_are_seen(facts):
    lp = {
        "tokens": list("cde"),
        "token_logprobs": [-20.0] * 3,
        "top_logprobs": [{c: -20.0} for c in "cde"],
        "text_offset": [0, 1, 2],
    }
    two = [dict(RIGHT["choices"][0], index=i, text="cde", logprobs=lp) for i in (0, 1)]
    for choice in two:
        del choice["prompt_logprobs"]
    body = RIGHT | {
        "choices": two,
        "usage": RIGHT["usage"] | {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10},
    }
    asked = {
        "prompt": ["ab", "ab"],
        "max_tokens": 3,
        "logprobs": 0,
        "temperature": 1,
        "return_token_ids": True,
    }
    assert (
        kind_of(Case("/v1/completions", asked), answer(body), facts)
        == "equal samples without a seed"
    )
    assert kind_of(Case("/v1/completions", asked | {"seed": 1}), answer(body), facts) is None


def test_numbers_that_python_would_not_write():
    schema, rng = {
        "anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]
    }, random.Random(1)
    drawn = [draw_wrong(rng, schema) for _ in range(200)]
    assert "18446744073709551616" in dumps({"x": [d for d in drawn]})
    assert not any(holds(schema, d) for d in drawn)


def test_simpler_values_are_simpler():
    assert (
        [0, 1, 2] == list(simpler(5))[:3]
        and [3] in list(simpler([3, 4]))
        and "a" in list(simpler("abc"))
    )
    assert not list(simpler(True)) and {"a": 1} in list(simpler({"a": 1, "b": 2}))
