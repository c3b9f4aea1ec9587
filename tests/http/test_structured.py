"""Constrained output on both generating routes: whatever the model would write, an answer that ends is valid."""
import json
import re

import openai
import pydantic
import pytest

from chat_models import HERMES, model_with
from conftest import Server

HELLO = [{"role": "user", "content": "Once upon a time there was a little dog."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
                   "tags": {"type": "array", "items": {"enum": ["big", "small"]}, "maxItems": 2}},
    "required": ["name", "age", "tags"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "dog", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    s = Server("--served-model-name", "demo", "--kv-cache-memory", "64MiB", "--device", "cpu",
               model=model_with(tmp_path_factory.mktemp("structured") / "demo", HERMES))
    yield s
    s.wait_idle()
    assert s.stop() == 0, s.log


def complete(server, **fields):
    r = server.ask("POST", "/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 400, "seed": 1} | fields)
    assert r.status_code == 200, r.text
    return r.json()["choices"]


def chat(server, **fields):
    r = server.ask("POST", "/v1/chat/completions", json={"messages": HELLO, "max_tokens": 400, "seed": 1} | fields)
    assert r.status_code == 200, r.text
    return [c | {"text": c["message"]["content"]} for c in r.json()["choices"]]


def is_dog(text):
    dog = json.loads(text)
    assert set(dog) == {"name", "age", "tags"} and len(dog["name"]) <= 6 and dog["age"] in range(121)
    assert len(dog["tags"]) <= 2 and set(dog["tags"]) <= {"big", "small"}


WAYS = [
    ({"response_format": FORMAT}, is_dog),
    ({"structured_outputs": {"json": SCHEMA}}, is_dog),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_dog),
    ({"guided_json": SCHEMA}, is_dog),
    ({"structured_outputs": {"regex": "[a-c]{2,5}[0-9]"}}, lambda text: re.fullmatch("[a-c]{2,5}[0-9]", text) or pytest.fail(text)),
    ({"guided_regex": "(yes|no)!"}, lambda text: text in ("yes!", "no!") or pytest.fail(text)),
    ({"structured_outputs": {"choice": ["a dog", "a cat", "a\"b\n"]}}, lambda text: text in ("a dog", "a cat", "a\"b\n") or pytest.fail(text)),
    ({"guided_choice": ["tick", "tock"]}, lambda text: text in ("tick", "tock") or pytest.fail(text)),
    ({"structured_outputs": {"grammar": 'start: "x" ("+" "y")? "="'}}, lambda text: text in ("x=", "x+y=") or pytest.fail(text)),
    ({"guided_grammar": 'start: A B\nA: /[0-9]/\nB: "!"'}, lambda text: re.fullmatch("[0-9]!", text) or pytest.fail(text)),
]


@pytest.mark.parametrize("fields, check", WAYS, ids=lambda v: json.dumps(v)[:40] if isinstance(v, dict) else "")
def test_every_answer_is_valid(server, fields, check):
    for choice in complete(server, n=3, temperature=0.7, **fields) + chat(server, n=3, temperature=0.7, **fields):
        assert choice["finish_reason"] == "stop", choice
        check(choice["text"])


def test_a_stream_is_the_same(server):
    want = [c["text"] for c in complete(server, n=3, temperature=1, response_format=FORMAT)]
    texts = ["", "", ""]
    body = {"prompt": "Once upon a time", "max_tokens": 400, "seed": 1, "n": 3, "temperature": 1, "response_format": FORMAT, "stream": True}
    for line in server.ask("POST", "/v1/completions", json=body).text.splitlines():
        if line.startswith("data: {"):
            c = json.loads(line[6:])["choices"][0]
            texts[c["index"]] += c["text"]
    assert texts == want


def test_json_objects(server):
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}, {"guided_json_object": True}):
        for c in complete(server, n=3, temperature=1, max_tokens=60, **fields):
            assert c["text"].lstrip()[:1] in ("{", "")
            if c["finish_reason"] == "stop":
                assert isinstance(json.loads(c["text"]), dict)


def test_tags_in_free_text(server):
    tags = {"structures": [{"begin": "<n=", "schema": {"type": "integer"}, "end": ">"}], "triggers": ["<n="]}
    for c in complete(server, n=4, temperature=1, max_tokens=30, structured_outputs={"structural_tag": tags}):
        rest = re.sub(r"<n=-?[0-9]+>", "", c["text"])
        assert "<n=" not in rest or c["finish_reason"] == "length"


def test_constrained_and_free_prompts_side_by_side(server):
    free = complete(server, temperature=0, max_tokens=20)[0]["text"]
    body = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
    import concurrent.futures
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: server.ask("POST", "/v1/completions", json=body | ({"guided_choice": ["tick", "tock"]} if i % 2 else {})).json(), range(8)))
    for i, a in enumerate(answers):
        assert a["choices"][0]["text"] in ("tick", "tock") if i % 2 else a["choices"][0]["text"] == free


def test_the_sdk_parses(server):
    class Dog(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=6)
        age: int = pydantic.Field(ge=0, le=20)

    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    a = client.chat.completions.parse(model="demo", messages=HELLO, max_tokens=100, seed=1, response_format=Dog)
    assert isinstance(a.choices[0].message.parsed, Dog)


@pytest.mark.parametrize("fields, param, part", [
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "(?=a)b"}}}}, "response_format", "json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "moon"}}}}, "response_format", "type"),
    ({"structured_outputs": {"regex": "(" * 3000}}, "structured_outputs", "structured_outputs.regex"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
    ({"guided_choice": []}, "guided_choice", "not empty"),
    ({"guided_json": "{"}, "guided_json", "JSON"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "both"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "whitespace"),
])
def test_refusals(server, fields, param, part):
    for route, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": HELLO})):
        r = server.ask("POST", route, json=body | fields)
        assert r.status_code == 400 and r.json()["error"]["param"] == param and part in r.json()["error"]["message"], r.text


def test_a_hostile_schema_is_refused_at_once(server):
    deep = "[" * 20000 + "]" * 20000
    for body in (f'{{"prompt": "x", "guided_json": {deep}}}', json.dumps({"prompt": "x", "guided_regex": "((a*)*)*" * 2000}),
                 json.dumps({"prompt": "x", "guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}})):
        r = server.ask("POST", "/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert r.status_code in (200, 400), r.text
    assert complete(server, max_tokens=1)
    r = server.ask("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 2, "guided_regex": "(a?b?)" * 2000})
    assert r.status_code == 400 and "first token" in r.json()["error"]["message"], r.text
    assert complete(server, max_tokens=2, guided_regex="((a*)*)*" * 2000 + "b")[0]["finish_reason"] in ("stop", "length")


def metric(server, name):
    return sum(float(line.split()[-1]) for line in server.get("/metrics").splitlines() if line.startswith(f"quire_{name}"))


# Which letters are so many characters before the end decides, so that each text leads to a state of its own.
COSTLY = "(" + "|".join(f"[ -~]*[{letters}][ -~]{{{40 + 9 * i}}}" for i, letters in enumerate(["a-m ", "aeiou", "n-z", "a-z", "e-q", "c-x"])) + ")!"


def test_costly_masks_delay_their_own_sequence_alone(server):
    """A stream beside requests whose masks take the work of many steps gets the tokens that it gets alone."""
    import concurrent.futures
    free = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    alone = server.ask("POST", "/v1/completions", json=free).json()
    late = metric(server, "late_masks_total")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        costly = [pool.submit(complete, server, max_tokens=24, temperature=1, seed=i, guided_regex=COSTLY + "!" * i) for i in range(3)]
        beside = pool.submit(server.ask, "POST", "/v1/completions", json=free).result().json()
        for c in costly:
            choice = c.result()[0]
            assert choice["finish_reason"] == "length" and re.fullmatch("[ -~]*", choice["text"]), choice
    assert metric(server, "late_masks_total") > late
    assert beside["choices"] == alone["choices"] and beside["usage"] == alone["usage"]
