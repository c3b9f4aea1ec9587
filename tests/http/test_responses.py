"""/v1/responses with OpenAI's SDK, and with bodies as agents send them: the demo model with the small template of
test_chat. What bodies become and what answers look like is tested in tests/unit/server/test_translate.c and
tests/unit/server/stream/test_dialects.c."""
import json

import openai
import pytest

from test_chat import HELLO, chat, client  # noqa: F401  (fixtures)

BODY = {"model": "demo", "max_output_tokens": 12, "temperature": 0, "input": HELLO[0]["content"]}
CHAT = {"model": "demo", "max_tokens": 12, "temperature": 0, "messages": HELLO}


def ask(server, path="/v1/responses", **fields):
    return server.ask("POST", path, json={k: v for k, v in (BODY | fields).items() if v is not None})


def events(answer):
    """The events of a stream; each is named twice, alike, and they are numbered."""
    found = []
    blocks = answer.text.split("\n\n")[:-1]
    assert blocks.pop() == "data: [DONE]"
    for i, block in enumerate(blocks):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + found[-1]["type"] and found[-1]["sequence_number"] == i
    return found


def text_of(response):
    return "".join(p["text"] for item in response["output"] for p in item["content"])


def test_is_the_answer_of_the_same_chat(chat):
    same = chat.ask("POST", "/v1/chat/completions", json=CHAT).json()
    a = ask(chat)
    r = a.json()
    assert a.status_code == 200 and r["id"] == "resp_" + a.headers["x-request-id"]
    assert r["object"] == "response" and r["model"] == "demo"
    assert r["status"] == "incomplete" and r["incomplete_details"] == {"reason": "max_output_tokens"}
    item, = r["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert text_of(r) == same["choices"][0]["message"]["content"]
    assert r["usage"]["input_tokens"] == same["usage"]["prompt_tokens"] and r["usage"]["output_tokens"] == 12


def test_events(chat):
    whole = ask(chat).json()
    e = events(ask(chat, stream=True))
    kinds = [x["type"].removeprefix("response.") for x in e]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert len({x["item_id"] for x in e[3:-2]} | {e[2]["item"]["id"], e[-2]["item"]["id"]}) == 1
    assert "".join(x["delta"] for x in e[4:-4]) == e[-4]["text"] == text_of(whole) == text_of(e[-1]["response"])
    assert [x["response"]["status"] for x in e[:2]] == ["in_progress", "in_progress"]
    last = e[-1]["response"]
    assert last["output"] == [e[-2]["item"]] and last["usage"] == whole["usage"] | {
        "input_tokens_details": last["usage"]["input_tokens_details"]}


def test_an_answer_that_ends_by_itself_is_completed(chat):
    r = ask(chat, max_output_tokens=None, stop=".").json()
    assert r["status"] == "completed" and r["incomplete_details"] is None and r["max_output_tokens"] is None
    assert r["output"][0]["status"] == "completed"
    assert events(ask(chat, max_output_tokens=None, stop=".", stream=True))[-1]["type"] == "response.completed"


def test_items_and_instructions(chat):
    messages = [{"role": "system", "content": "Be kind."}] + HELLO + [{"role": "assistant", "content": "Yes."}] + HELLO
    want = chat.ask("POST", "/v1/chat/completions", json=CHAT | {"messages": messages}).json()
    for instructions, first in (("Be kind.", []), (None, [{"role": "developer", "content": "Be kind."}])):
        items = first + [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": HELLO[0]["content"]}]},
            {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "Yes.", "annotations": []}]}] + HELLO
        r = ask(chat, input=items, instructions=instructions).json()
        assert text_of(r) == want["choices"][0]["message"]["content"]
        assert r["usage"]["input_tokens"] == want["usage"]["prompt_tokens"]


def test_a_coding_agents_request(chat):
    """The fields that Codex sends, and its look whether a server answers: no input, one token."""
    fields = dict(instructions="You are a coding agent.", tools=[{"type": "web_search", "external_web_access": False}],
                  tool_choice="auto", parallel_tool_calls=True, reasoning={"effort": "medium", "summary": "auto"},
                  store=False, stream=True, include=["reasoning.encrypted_content"], prompt_cache_key="0199-ab",
                  text={"verbosity": "medium"}, service_tier="auto", client_metadata={"session": "1"}, temperature=None)
    a = ask(chat, **fields)
    assert a.status_code == 200, a.text
    assert a.headers["x-quire-ignored"] == "tools.web_search"
    last = events(a)[-1]["response"]
    assert last["store"] is False and last["prompt_cache_key"] == "0199-ab" and last["tools"] == []
    probe = ask(chat, **fields | {"input": [], "max_output_tokens": 1, "stream": False, "instructions": None})
    assert probe.status_code == 200 and probe.json()["usage"]["output_tokens"] == 1


def test_the_answer_repeats_the_request(chat):
    given = dict(top_p=0.9, presence_penalty=0.5, metadata={"k": "v"}, user="u", safety_identifier="s", instructions="Be kind.",
                 truncation="auto", max_tool_calls=3, parallel_tool_calls=False, store=True, background=False)
    r = ask(chat, **given).json()
    repeated = given | {"store": False, "truncation": "disabled", "temperature": 0, "frequency_penalty": 0}
    assert {k: r[k] for k in repeated} == repeated


def test_log_probabilities(chat):
    """The same as the chat's; in a stream each piece of text has its own."""
    wanted = dict(include=["message.output_text.logprobs"], top_logprobs=2)
    r = ask(chat, **wanted).json()
    part = r["output"][0]["content"][0]
    assert "".join(t["token"] for t in part["logprobs"]) == part["text"] and r["top_logprobs"] == 2
    assert all(len(t["top_logprobs"]) == 2 and t["logprob"] <= 0 for t in part["logprobs"])
    same = chat.ask("POST", "/v1/chat/completions", json=CHAT | {"logprobs": True, "top_logprobs": 2}).json()
    assert [t["token"] for t in part["logprobs"]] == [t["token"] for t in same["choices"][0]["logprobs"]["content"]]
    e = events(ask(chat, stream=True, **wanted))
    pieces = [x for x in e if x["type"] == "response.output_text.delta"]
    deltas = [t for x in pieces for t in x["logprobs"]]
    assert "".join(x["delta"] for x in pieces) == part["text"] and all(x["logprobs"] for x in pieces)
    done, = [x for x in e if x["type"] == "response.output_text.done"]
    assert [t["token"] for t in deltas] == [t["token"] for t in done["logprobs"]] == [t["token"] for t in part["logprobs"]]
    assert e[-1]["response"]["output"][0]["content"][0]["logprobs"] == done["logprobs"]
    assert ask(chat, top_logprobs=2).json()["output"][0]["content"][0]["logprobs"] == []


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
# each changes what the chat of these tests answers
SAMPLING = [
    {"temperature": 1, "seed": 7, "min_p": 0.2}, {"repetition_penalty": 5}, {"presence_penalty": 2, "frequency_penalty": 2},
    {"logit_bias": {"300": 100}}, {"allowed_token_ids": [300, 301, 302]}, {"logit_bias": {"300": 100}, "stop_token_ids": [300]},
    {"logit_bias": {"300": 100}, "stop_token_ids": [300], "min_tokens": 5},
    {"guided_json": SCHEMA}, {"guided_regex": "[ab]{3}"}, {"guided_choice": ["ab", "cd"]}, {"guided_grammar": 'start: "ab"'},
    {"guided_json_object": True}, {"structured_outputs": {"json": SCHEMA}},
]


@pytest.mark.parametrize("fields", SAMPLING, ids=lambda f: "-".join(f))
def test_fields_of_chats_that_choose_tokens_do_so_here(chat, fields):
    plain, same = (chat.ask("POST", "/v1/chat/completions", json=CHAT | f).json() for f in ({}, fields))
    want = same["choices"][0]["message"]["content"]
    assert want != plain["choices"][0]["message"]["content"]
    a = ask(chat, **fields)
    assert a.status_code == 200 and "X-Quire-Ignored" not in a.headers and text_of(a.json()) == want


def test_words_that_are_never_made(chat):
    whole = text_of(ask(chat).json())
    words = whole.split()
    same = chat.ask("POST", "/v1/chat/completions", json=CHAT | {"bad_words": words}).json()
    assert text_of(ask(chat, bad_words=words).json()) == same["choices"][0]["message"]["content"] != whole


def test_a_request_id_is_that_of_the_answer(chat):
    assert ask(chat, request_id="abc").json()["id"] == "resp_abc"


@pytest.mark.parametrize("format", [
    {"type": "json_schema", "name": "n", "schema": SCHEMA}, {"type": "json_object", "schema": SCHEMA},
], ids=lambda f: f["type"])
def test_formats_with_a_schema(chat, format):
    r = ask(chat, text={"format": format}, max_output_tokens=200).json()
    assert json.loads(text_of(r)) == {"a": "x"} and r["status"] == "completed" and r["text"]["format"] == format


@pytest.mark.parametrize("form", ["structures", "triggered_tags"])
def test_structural_tags(chat, form):
    whole = text_of(ask(chat).json())
    word = whole.split()[1]
    if form == "structures":
        tags = {"triggers": [word], "structures": [{"begin": word + "<", "schema": SCHEMA, "end": ">"}]}
    else:
        content = {"type": "json_schema", "json_schema": SCHEMA}
        tags = {"format": {"type": form, "triggers": [word], "tags": [{"begin": word + "<", "content": content, "end": ">"}]}}
    format = {"type": "structural_tag"} | tags
    r = ask(chat, text={"format": format}, max_output_tokens=200).json()
    before, inside = text_of(r).split(word + "<", 1)
    assert before == whole.split(word)[0] and json.loads(inside.split(">")[0]) == {"a": "x"} and r["text"]["format"] == format
    same = chat.ask("POST", "/v1/chat/completions", json=CHAT | {"response_format": format, "max_tokens": 200}).json()
    assert same["choices"][0]["message"]["content"] == text_of(r)


def test_tokens_are_counted(chat):
    n = ask(chat).json()["usage"]["input_tokens"]
    a = ask(chat, "/v1/responses/input_tokens", max_output_tokens=None, temperature=None)
    assert a.status_code == 200 and a.json() == {"object": "response.input_tokens", "input_tokens": n}


@pytest.mark.parametrize("fields, param, words", [
    ({"input": None}, "input", "input is missing"),
    ({"input": 7}, "input", "must be a text or a list"),
    ({"input": [{"role": "nobody", "content": "x"}]}, "input", "role 'nobody'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "'input_image'"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "stores none"),
    ({"input": HELLO[0]["content"] * 300}, "input", "tokens"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
    ({"conversation": "conv_1"}, "conversation", "stores no responses"),
    ({"background": True}, "background", "not supported"),
    ({"max_output_tokens": 0}, "max_output_tokens", "between 1"),
    ({"temperature": 3}, "temperature", "at most 2"),
    ({"top_logprobs": 21}, "top_logprobs", "top_logprobs is 21"),
    ({"text": {"format": {}}}, "text", "text.format"),
    ({"text": {"format": {"type": "structural_tag"}}}, "text", "text.format needs triggers"),
    ({"text": {"format": {"type": "structural_tag", "triggers": ["<f"]}}}, "text", "text.format needs a list of tags"),
    ({"text": {"verbosity": 2}}, "text", "text.verbosity must be a string"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs", "structured_outputs.regex"),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex", "both constrain"),
    ({"min_tokens": 20}, "min_tokens", "at most max_tokens"),
    ({"tools": {}}, "tools", "tools must be a list"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "names a function"),
])
def test_refusals(chat, fields, param, words):
    a = ask(chat, **fields)
    e = a.json()["error"]
    assert a.status_code == 400 and e["param"] == param and words in e["message"] and e["type"] == "invalid_request_error"


def test_keys_metrics_and_log(start):
    s = start("--api-key", "alpha")
    assert ask(s).status_code == 401
    a = s.ask("POST", "/v1/responses", json=BODY | {"model": "null"}, headers={"Authorization": "Bearer alpha"})
    assert a.status_code == 400 and "chat is not possible" in a.json()["error"]["message"]  # the null model has no template


def test_sdk(client):
    fields = dict(model="demo", input=HELLO, max_output_tokens=12, temperature=0)
    whole = client.responses.create(**fields)
    assert whole.id.startswith("resp_") and whole.output[0].id.startswith("msg_") and whole.output_text
    with client.responses.stream(**fields) as stream:
        kinds = [e.type for e in stream]
        assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"
    streamed = [e for e in client.responses.create(stream=True, **fields)]
    assert "".join(e.delta for e in streamed if e.type == "response.output_text.delta") == whole.output_text
    n = client.responses.input_tokens.count(model="demo", input=HELLO).input_tokens
    assert n == whole.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="stores no responses"):
        client.responses.create(previous_response_id="resp_1", **fields)


def test_agents_sdk(chat):
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    agents.set_tracing_disabled(True)
    sdk = openai.AsyncOpenAI(base_url=chat.url + "/v1", api_key="none", max_retries=0)
    agent = agents.Agent(name="teller", instructions="Be kind.", model=agents.OpenAIResponsesModel("demo", sdk),
                         model_settings=agents.ModelSettings(temperature=0, extra_body={"stop": "e"}))
    done = agents.Runner.run_sync(agent, HELLO[0]["content"])
    messages = [{"role": "system", "content": "Be kind."}] + HELLO
    want = chat.ask("POST", "/v1/chat/completions", json=CHAT | {"messages": messages, "max_tokens": 900, "stop": "e"}).json()
    assert done.final_output == want["choices"][0]["message"]["content"]
