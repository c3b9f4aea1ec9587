"""Answers under grammars where blocks run out, in both ways of preemption: every answer is valid,
and with --deterministic the same as without company; whole and streamed, as samples, beams and
tool calls, with drafts and without."""

import concurrent.futures
import json
import re

import pytest

from chat_models import HERMES, model_with
from conftest import serving

PROMPT = "Once upon a time there was a little dog. " * 6
DOG = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 20, "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "toys": {
            "type": "array",
            "items": {"enum": ["big red ball", "small blue bone"]},
            "minItems": 2,
            "maxItems": 4,
        },
    },
    "required": ["name", "age", "toys"],
    "additionalProperties": False,
}
WORDS = "([a-z]{3,8} ){9}[a-z]{3,8}!"
TOOL = {"type": "function", "function": {"name": "adopt", "parameters": DOG}}


def is_dog(text):
    dog = json.loads(text)
    assert 20 <= len(dog["name"]) <= 40 and dog["age"] in range(121), dog
    assert set(dog["toys"]) <= {"big red ball", "small blue bone"} and 2 <= len(dog["toys"]) <= 4


def is_words(text):
    assert re.fullmatch(WORDS, text), text


def texts_of(choice):
    """The text of a choice, or the arguments of its calls."""
    message = choice.get("message", {"content": choice.get("text")})
    calls = message.get("tool_calls") or []
    return [c["function"]["arguments"] for c in calls] or [message["content"]]


def check_ended(choice, check):
    """Only `max_tokens`, which white space of JSON may reach, leaves an answer unfinished."""
    assert check is is_dog or choice["finish_reason"] == "stop", choice
    for text in texts_of(choice) if choice["finish_reason"] != "length" else []:
        check(text)


FORMAT = {"type": "json_schema", "json_schema": {"name": "dog", "strict": True, "schema": DOG}}
COMMON = {"max_tokens": 200, "temperature": 0.9}
COMPLETION = COMMON | {"prompt": PROMPT}
CHAT = COMMON | {"messages": [{"role": "user", "content": PROMPT}]}
# The body of a request, and what holds for each of its answers.
ASKED = [
    (COMPLETION | {"response_format": FORMAT, "n": 2, "seed": 1}, is_dog),
    (COMPLETION | {"structured_outputs": {"regex": WORDS}, "n": 3, "seed": 2}, is_words),
    (COMPLETION | {"guided_grammar": f"start: /{WORDS}/", "seed": 3}, is_words),
    (
        COMPLETION
        | {"guided_regex": WORDS, "use_beam_search": True, "n": 2, "temperature": 0},
        is_words,
    ),
    (CHAT | {"response_format": FORMAT, "seed": 4}, is_dog),
    (CHAT | {"tools": [TOOL], "tool_choice": "required", "n": 2, "seed": 5}, is_dog),
]


def ask(server, asked, stream):
    """The texts of each choice, in order; whole answers are checked."""
    body, check = asked
    route = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    answer = server.ask("POST", route, json=body | {"stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream:
        choices = sorted(answer.json()["choices"], key=lambda c: c["index"])
        for choice in choices:
            check_ended(choice, check)
        return [texts_of(c) for c in choices]
    made = {}
    for line in answer.text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            texts = made.setdefault(choice["index"], {})
            delta = choice.get("delta", {"content": choice.get("text")})
            for call in delta.get("tool_calls") or []:
                at = texts.setdefault(call["index"], [])
                at.append(call["function"].get("arguments") or "")
            if delta.get("content"):
                texts.setdefault(0, []).append(delta["content"])
    return [["".join(made[i][k]) for k in sorted(made[i])] for i in sorted(made)]


@pytest.mark.parametrize("drafts", ["off", "suffix", "grammar"])
@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_grammars_hold_when_blocks_run_out(tmp_path, way, drafts):
    model = model_with(tmp_path / "demo", HERMES)
    flags = "--served-model-name demo --device cpu --deterministic --block-size 8 --kv-blocks 150"
    flags += f" --preemption {way} --swap-space 64MiB --max-num-seqs 24 --speculate {drafts}"
    with serving(*flags.split(), model=model) as server:
        alone = [ask(server, asked, False) for asked in ASKED]
        assert server.metric("num_preemptions_total") == 0
        jobs = [(i, stream) for i in range(len(ASKED)) for stream in (False, True)] * 2
        with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
            made = list(pool.map(lambda job: ask(server, ASKED[job[0]], job[1]), jobs))
        for (i, stream), texts in zip(jobs, made):
            assert texts == alone[i], (i, stream)
        assert server.metric("num_preemptions_total") > 0
