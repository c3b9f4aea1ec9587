"""The OpenAI SDK and plain JSON against /v1/completions and related routes."""
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from conftest import PATIENCE_S
from raw import error_of, events


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as c:
        yield c


def complete(http, **body):
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_sdk_completion(client):
    a = client.completions.create(model="null", prompt="Once upon a time", max_tokens=7, seed=1)
    assert a.object == "text_completion" and a.id.startswith("cmpl-") and a.model == "null"
    assert len(a.choices) == 1 and len(a.choices[0].text) == 7 and a.choices[0].finish_reason == "length"
    assert (a.usage.prompt_tokens, a.usage.completion_tokens, a.usage.total_tokens) == (16, 7, 23)


def test_sdk_stream_is_the_same_text(client):
    ask = dict(model="null", prompt="abc", max_tokens=20, seed=3)
    whole = client.completions.create(**ask)
    parts = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].text for p in parts if p.choices) == whole.choices[0].text
    assert [p.choices[0].finish_reason for p in parts if p.choices] == [None] * 19 + ["length"]
    assert parts[-1].choices == [] and parts[-1].usage == whole.usage
    assert len({p.id for p in parts}) == 1


def test_sdk_errors(client, server):
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(model="null", prompt="x", temperature=3)
    assert e.value.param == "temperature" and e.value.status_code == 400 and "at most 2" in str(e.value)
    with pytest.raises(openai.NotFoundError) as e:
        client.completions.create(model="gpt-5", prompt="x")
    assert e.value.param == "model"
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model="null", messages=[{"role": "user", "content": "x"}])
    assert "no chat template" in str(e.value)
    assert [m.id for m in client.models.list()] == ["null"]
    assert client.models.retrieve("null").id == "null"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_async_sdk(server):
    import asyncio

    async def one(client, i):
        stream = await client.completions.create(model="null", prompt=f"p{i}", max_tokens=10, stream=True, seed=i)
        return "".join([p.choices[0].text async for p in stream])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, i) for i in range(32)))

    assert all(len(t) == 10 for t in asyncio.run(all_of_them()))


def test_prompt_forms_and_order(http):
    each = [complete(http, prompt=p, seed=5, max_tokens=8)["choices"][0]["text"] for p in ("a", "bc")]
    both = complete(http, prompt=["a", "bc"], seed=5, max_tokens=8)
    assert [c["index"] for c in both["choices"]] == [0, 1]
    assert [c["text"] for c in both["choices"]] == each
    assert both["usage"]["prompt_tokens"] == 3 and both["usage"]["completion_tokens"] == 16
    ids = complete(http, prompt=[[97], [98, 99]], seed=5, max_tokens=8)
    assert [c["text"] for c in ids["choices"]] == each
    assert complete(http, prompt=[98, 99], seed=5, max_tokens=8)["choices"][0]["text"] == each[1]


def test_n_choices(http):
    a = complete(http, prompt=["a", "b"], n=3, seed=5, max_tokens=8)
    assert [c["index"] for c in a["choices"]] == list(range(6))
    assert len({c["text"] for c in a["choices"][:3]}) == 3
    with http.stream("POST", "/v1/completions", json=dict(prompt=["a", "b"], n=3, seed=5, max_tokens=8, stream=True)) as s:
        body = s.read()
    texts = {i: "" for i in range(6)}
    for e in events(body)[:-1]:
        choice = json.loads(e)["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert events(body)[-1] == "[DONE]"
    assert [texts[i] for i in range(6)] == [c["text"] for c in a["choices"]]


def test_stop_string_never_goes_out(http):
    text = complete(http, prompt="x", seed=9, max_tokens=60)["choices"][0]["text"]
    stop = text[30:33]
    cut = text.index(stop)
    a = complete(http, prompt="x", seed=9, max_tokens=60, stop=stop)["choices"][0]
    assert (a["text"], a["finish_reason"], a["stop_reason"]) == (text[:cut], "stop", stop)
    body = http.post("/v1/completions", json=dict(prompt="x", seed=9, max_tokens=60, stop=[stop], stream=True)).content
    parts = [json.loads(e)["choices"][0] for e in events(body)[:-1]]
    assert "".join(p["text"] for p in parts) == text[:cut]
    assert (parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == ("stop", stop)
    kept = complete(http, prompt="x", seed=9, max_tokens=60, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == text[:cut] + stop


def test_stop_token(http):
    text = complete(http, prompt="x", seed=9, max_tokens=60)["choices"][0]["text"]
    a = complete(http, prompt="x", seed=9, max_tokens=60, stop_token_ids=[ord(text[20])])["choices"][0]
    assert a["finish_reason"] == "stop" and a["stop_reason"] == ord(text[20])


def test_logprobs_and_echo(http):
    a = complete(http, prompt="ab", seed=2, max_tokens=4, logprobs=2)["choices"][0]
    lp = a["logprobs"]
    assert "".join(lp["tokens"]) == a["text"] and lp["text_offset"] == [0, 1, 2, 3]
    assert all(t in top and top[t] == p and 2 <= len(top) <= 3
               for t, p, top in zip(lp["tokens"], lp["token_logprobs"], lp["top_logprobs"]))
    e = complete(http, prompt="ab", seed=2, max_tokens=4, logprobs=1, echo=True)["choices"][0]
    assert e["text"] == "ab" + a["text"]
    assert e["logprobs"]["tokens"] == list(e["text"]) and e["logprobs"]["text_offset"] == list(range(6))
    assert e["logprobs"]["token_logprobs"][0] is None and e["logprobs"]["top_logprobs"][0] is None
    assert None not in e["logprobs"]["token_logprobs"][1:]


def test_a_prompt_alone(http, server):
    before = server.metric("prompt_tokens_total")
    only = complete(http, prompt="ab", max_tokens=0, echo=True)["choices"][0]
    assert only["text"] == "ab" and only["finish_reason"] == "length"
    server.wait_metric("prompt_tokens_total", before + 2)


def test_prompt_logprobs(http):
    a = complete(http, prompt="abc", max_tokens=1, prompt_logprobs=1)["choices"][0]
    assert a["logprobs"] is None and len(a["prompt_logprobs"]) == 3 and a["prompt_logprobs"][0] is None
    assert str(ord("b")) in a["prompt_logprobs"][1]


def test_token_ids(http):
    a = complete(http, prompt="ab", seed=2, max_tokens=4, return_token_ids=True)["choices"][0]
    assert a["prompt_token_ids"] == [97, 98] and bytes(a["token_ids"]).decode() == a["text"]
    body = http.post("/v1/completions", json=dict(prompt="ab", seed=2, max_tokens=4, return_token_ids=True, stream=True)).content
    parts = [json.loads(e)["choices"][0] for e in events(body)[:-1]]
    assert sum((p["token_ids"] for p in parts), []) == a["token_ids"]
    assert [p.get("prompt_token_ids") for p in parts] == [[97, 98]] + [None] * (len(parts) - 1)


def test_continuous_usage(http):
    ask = dict(prompt="ab", max_tokens=4, stream=True, stream_options=dict(continuous_usage_stats=True))
    parts = [json.loads(e) for e in events(http.post("/v1/completions", json=ask).content)[:-1]]
    assert [p["usage"]["completion_tokens"] for p in parts] == [1, 2, 3, 4]
    assert all(p["usage"]["prompt_tokens"] == 2 for p in parts)


def test_best_of(http):
    a = complete(http, prompt="x", n=2, best_of=4, max_tokens=5, seed=1)
    assert len(a["choices"]) == 2 and a["usage"]["completion_tokens"] == 20


def test_text_is_whole_characters(http):
    ask = dict(prompt="x", max_tokens=40, allowed_token_ids=[0xc3, 0xa9, 0x41], seed=4)
    whole = complete(http, **ask)["choices"][0]["text"]
    body = http.post("/v1/completions", json=dict(ask, stream=True)).content
    parts = [json.loads(e)["choices"][0]["text"] for e in events(body)[:-1]]
    assert "".join(parts) == whole and "é" in whole


def test_request_ids(http):
    a = http.post("/v1/completions", json=dict(prompt="x"), headers={"X-Request-Id": "abc-1"})
    assert a.headers["x-request-id"] == "abc-1" and a.json()["id"] == "cmpl-abc-1"
    a = http.post("/v1/completions", json=dict(prompt="x", request_id="mine"))
    assert a.headers["x-request-id"] == "mine" and a.json()["id"] == "cmpl-mine"
    a = http.get("/health", headers={"X-Request-Id": "bad id\x7f"})
    assert a.headers["x-request-id"] not in ("", "bad id\x7f")
    assert http.get("/health").headers["x-request-id"] != http.get("/health").headers["x-request-id"]


def test_unknown_fields_are_named(http):
    a = http.post("/v1/completions", json=dict(prompt="x", temprature=1, foo={}))
    assert a.status_code == 200 and a.headers["x-quire-ignored"] == "temprature, foo"
    assert http.post("/tokenize", json=dict(prompt="x", bar=1)).headers["x-quire-ignored"] == "bar"


def test_unknown_fields_rejected(start):
    s = start("--unknown-fields", "reject")
    a = s.ask("POST", "/v1/completions", json=dict(prompt="x", temprature=1))
    assert a.status_code == 400 and "temprature" in error_of(a.content)["message"]


@pytest.mark.parametrize("body, param", [
    (dict(prompt=""), "prompt"), (dict(), "prompt"), (dict(prompt="x", n=0), "n"), (dict(prompt=[300]), "prompt"),
    (dict(prompt="x", stop=[""]), "stop"), (dict(prompt="x", logit_bias={"999": 1}), "logit_bias"),
    (dict(prompt="x", max_tokens=10**9), "max_tokens"), (dict(prompt="x" * 40000), "prompt"),
    (dict(prompt="x", guided_json=[]), "guided_json"), (dict(prompt="x", suffix="y"), "suffix"),
    (dict(prompt="x", stream_options={}), "stream_options"),
])
def test_refusals(http, body, param):
    a = http.post("/v1/completions", json=body)
    error = error_of(a.content)
    assert a.status_code == error["code"] == 400 and error["param"] == param and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"prompt":"\xff"}', b'{"prompt":"\\ud800"}', b'{"a":1e999}', b"[" * 100000,
                                  b'{"prompt":"x","prompt":"y"}', b'{"seed":' + b"9" * 100 + b"}", b"\x00" * 10])
def test_bad_json(http, body):
    a = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert a.status_code == 400
    error_of(a.content)


def test_tokenize(http):
    a = http.post("/tokenize", json=dict(prompt="hé", return_token_strs=True)).json()
    assert a["tokens"] == list("hé".encode()) and a["count"] == 3 and a["token_strs"][0] == "h" and a["max_model_len"] > 0
    assert http.post("/detokenize", json=dict(tokens=a["tokens"])).json() == {"prompt": "hé"}
    assert http.post("/tokenize", json=dict(prompt=5)).status_code == 400
    assert error_of(http.post("/detokenize", json=dict(tokens=[-1])).content)["param"] == "tokens"


def test_tokens_of_nothing(http):
    a = http.post("/tokenize", json=dict(prompt="", return_token_strs=True))
    assert a.status_code == 200 and a.json()["tokens"] == [] == a.json()["token_strs"] and a.json()["count"] == 0
    a = http.post("/detokenize", json=dict(tokens=[]))
    assert a.status_code == 200 and a.json() == {"prompt": ""}


def test_nul_is_a_character(http):
    a = http.post("/tokenize", json=dict(prompt="a\0b"))
    assert a.status_code == 200 and a.json()["tokens"] == [97, 0, 98]
    assert http.post("/detokenize", json=dict(tokens=[97, 0, 98])).json() == {"prompt": "a\0b"}
    ids, text = (complete(http, prompt=p, seed=5, max_tokens=8, echo=True)["choices"][0]["text"] for p in ([97, 0, 98], "a\0b"))
    assert ids == text and text.startswith("a\0b")
    only = dict(prompt="x", seed=5, max_tokens=9, temperature=0, allowed_token_ids=[0], logit_bias={"0": 100})
    assert complete(http, **only)["choices"][0]["text"] == "\0" * 9
    a = complete(http, **only, stop=["\0\0\0"])["choices"][0]
    assert (a["text"], a["finish_reason"], a["stop_reason"]) == ("", "stop", "\0\0\0")
    body = http.post("/v1/completions", json=dict(**only, stop=["\0\0\0"], min_tokens=4, stream=True)).content
    last = json.loads(events(body)[-2])["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "\0\0\0")
    a = complete(http, prompt="x", seed=5, max_tokens=9, temperature=0, allowed_token_ids=[0, 65], bad_words=["\0"])["choices"][0]
    assert a["text"] == "A" * 9


def test_integers_are_judged_by_their_text(http):
    same = [http.post("/v1/completions", content=b'{"prompt":"x","temperature":1,"max_tokens":8,"seed":%s}' % seed,
                      headers={"Content-Type": "application/json"}).json()["choices"][0]["text"]
            for seed in (b"9007199254740993", b"9007199254740993.0", b"90071992547409930e-1", b"9007199254740992")]
    assert same[0] == same[1] == same[2] != same[3]
    a = http.post("/v1/completions", content=b'{"prompt":"x","max_tokens":1.%s,"seed":-0}' % (b"0" * 100_000),
                  headers={"Content-Type": "application/json"}).json()
    assert a["usage"]["completion_tokens"] == 1


def test_prompts_of_a_list_share_no_noise(http):
    texts = [c["text"] for c in complete(http, prompt=["x"] * 8, max_tokens=16, temperature=1)["choices"]]
    assert len(set(texts)) == 8
    texts = [c["text"] for c in complete(http, prompt=["x"] * 8, max_tokens=16, temperature=1, seed=3)["choices"]]
    assert len(set(texts)) == 1 and texts[0] == complete(http, prompt="x", max_tokens=16, temperature=1, seed=3)["choices"][0]["text"]


def test_prompts_of_a_server_with_a_seed(start):
    def texts(*lists):
        s = start("--seed", "7")
        with httpx.Client(base_url=s.url, timeout=PATIENCE_S) as http:
            return [c["text"] for p in lists for c in complete(http, prompt=p, max_tokens=16, temperature=1)["choices"]]

    of_a_list = texts(["x"] * 3)
    assert len(set(of_a_list)) == 3
    assert of_a_list == texts("x", "x", "x")


def test_64_streams_at_once(server):
    def one(i):
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        ask = dict(model="null", prompt=f"prompt {i}", max_tokens=100, seed=i)
        text = "".join(p.choices[0].text for p in client.completions.create(**ask, stream=True))
        return len(text) == 100 and client.completions.create(**ask).choices[0].text == text

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(one, range(64)))


def test_openapi_covers_the_routes(http):
    doc = http.get("/openapi.json").json()
    assert doc["openapi"].startswith("3.1")
    for path, methods in doc["paths"].items():
        for method in methods:
            answer = http.request(method, path.replace("{id}", "null"), json={} if method == "post" else None)
            assert str(answer.status_code) in methods[method]["responses"], (path, answer.text)


def test_version_and_head(http):
    assert http.get("/version").json()["version"]
    a = http.head("/health")
    assert a.status_code == 200 and a.content == b""
