"""Tool calls and reasoning in chats, with the OpenAI SDK: the bundled model with templates of chat_models.py. The model
calls a tool only where the grammar makes it, so what it calls with is its own."""
import json

import openai
import pytest

from chat_models import HERMES, REASONING, model_with
from conftest import Server

HELLO = [{"role": "user", "content": "Once upon a time there was a little dog."}]
COLOURS = ["red", "green", "blue"]


def tool(name, strict=None, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    function = {"name": name, "description": "A tool.", "parameters": parameters}
    return {"type": "function", "function": function | ({} if strict is None else {"strict": strict})}


PAINT = tool("paint", colour={"enum": COLOURS}, coats={"type": "integer", "minimum": 1, "maximum": 9})
STAY = tool("stay")
TOOLS = [PAINT, STAY]


def serve(tmp_path_factory, template, *flags):
    s = Server("--served-model-name", "demo", "--kv-cache-memory", "64MiB", "--device", "cpu", *flags,
               model=model_with(tmp_path_factory.mktemp("tools") / "demo", template))
    yield s
    s.wait_idle()
    assert s.stop() == 0, s.log


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    yield from serve(tmp_path_factory, HERMES)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    yield from serve(tmp_path_factory, REASONING)


def sdk(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(server):
    return sdk(server)


def post(server, **fields):
    return server.ask("POST", "/v1/chat/completions", json={"messages": HELLO, "max_tokens": 400} | fields)


def ask(client, messages=HELLO, **fields):
    return client.chat.completions.create(**{"model": "demo", "messages": messages, "max_tokens": 400, "seed": 1} | fields)


def check_call(call):
    arguments = json.loads(call.function.arguments)
    if call.function.name == "stay":
        assert arguments == {}
    else:
        assert call.function.name == "paint" and set(arguments) == {"colour", "coats"}
        assert arguments["colour"] in COLOURS and arguments["coats"] in range(1, 10)
    assert call.type == "function" and call.id


class Streamed:
    """The choices of a stream, put together as clients do it."""

    def __init__(self, events):
        self.text, self.reasoning, self.finish, self.calls = {}, {}, {}, {}
        for event in events:
            for c in event.choices:
                assert c.index not in self.finish, "an event behind its choice's end"
                self.text[c.index] = self.text.get(c.index, "") + (c.delta.content or "")
                self.reasoning[c.index] = self.reasoning.get(c.index, "") + (getattr(c.delta, "reasoning", None) or "")
                for call in c.delta.tool_calls or []:
                    self.add(self.calls.setdefault(c.index, []), call)
                if c.finish_reason:
                    self.finish[c.index] = c.finish_reason

    @staticmethod
    def add(calls, call):
        if call.index == len(calls):
            assert call.id and call.type == "function" and call.function.name
            calls.append([call.id, call.function.name, call.function.arguments])
        else:
            assert call.index == len(calls) - 1 and call.id is None and call.function.name is None
            calls[-1][2] += call.function.arguments


# ---- prompts ----

def test_tools_and_calls_are_rendered_by_the_template(client):
    call = {"id": "a", "type": "function", "function": {"name": "paint", "arguments": '{"colour": "red",  "coats": 2}'}}
    messages = HELLO + [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "done"}]
    text = (f"<system>Tools:\n{json.dumps(PAINT)}\n{json.dumps(STAY)}\n"
            'Write <tool_call>{"name": ..., "arguments": ...}</tool_call>.\n'
            f'<user>{HELLO[0]["content"]}\n<assistant>\n<tool_call>\n{{"name": "paint", "arguments": {{"colour": "red", "coats": 2}}}}\n</tool_call>\n'
            "<tool>done\n<assistant>")
    plain = client.completions.create(model="demo", prompt=text, temperature=0, max_tokens=12, extra_body={"add_special_tokens": False})
    a = ask(client, messages, tools=TOOLS, temperature=0, max_tokens=12)
    assert a.usage.prompt_tokens == plain.usage.prompt_tokens
    assert a.choices[0].message.content == plain.choices[0].text
    assert not a.choices[0].message.tool_calls and a.choices[0].finish_reason == "length"


def test_past_reasoning_is_rendered(thinker):
    client, used = sdk(thinker), set()
    for name in ("reasoning", "reasoning_content"):
        a = ask(client, HELLO + [{"role": "assistant", "content": "Woof.", name: "The dog must bark."}] + HELLO, max_tokens=1)
        used.add(a.usage.prompt_tokens)
    assert len(used) == 1
    assert used.pop() > ask(client, HELLO + [{"role": "assistant", "content": "Woof."}] + HELLO, max_tokens=1).usage.prompt_tokens


# ---- calls ----

@pytest.mark.parametrize("seed", range(5))
def test_required_calls_are_valid(client, seed):
    a = ask(client, tools=TOOLS, tool_choice="required", seed=seed)
    calls = a.choices[0].message.tool_calls
    assert calls and len({c.id for c in calls}) == len(calls)
    if a.choices[0].finish_reason == "length":
        calls = calls[:-1]  # the model called on and on
    else:
        assert a.choices[0].finish_reason == "tool_calls"
    for call in calls:
        check_call(call)


def test_a_named_function_is_called(client):
    for name in ("paint", "stay"):
        choice = {"type": "function", "function": {"name": name}}
        a = ask(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, temperature=1)
        [call] = a.choices[0].message.tool_calls
        assert call.function.name == name and a.choices[0].finish_reason == "tool_calls"
        check_call(call)


def test_a_stream_has_the_same_calls(client):
    fields = dict(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, n=3, temperature=1)
    whole = ask(client, **fields)
    s = Streamed(ask(client, stream=True, **fields))
    for i, c in enumerate(whole.choices):
        assert [(k.function.name, k.function.arguments) for k in c.message.tool_calls] == [(name, text) for _, name, text in s.calls[i]]
        assert s.text[i] == (c.message.content or "") and s.finish[i] == c.finish_reason == "tool_calls"
        check_call(c.message.tool_calls[0])
    ids = [call[0] for calls in s.calls.values() for call in calls]
    assert len(set(ids)) == len(ids) == 3 and all(i.startswith("call_") for i in ids)


def test_a_call_is_answered(client):
    """The way of an agent: a call, its result, and a text."""
    first = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0].message
    messages = HELLO + [first.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "done"}]
    a = ask(client, messages, tools=TOOLS, max_tokens=8)
    assert a.choices[0].message.content and a.choices[0].finish_reason == "length"


def test_functions_are_the_older_form(server):
    a = post(server, functions=[PAINT["function"]], function_call={"name": "paint"}).json()
    message = a["choices"][0]["message"]
    assert a["choices"][0]["finish_reason"] == "function_call" and "tool_calls" not in message
    assert message["function_call"]["name"] == "paint" and json.loads(message["function_call"]["arguments"])["colour"] in COLOURS


def test_without_a_choice_the_model_may_write_text(server):
    for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        a = post(server, tools=TOOLS, max_tokens=5, **fields).json()
        assert a["choices"][0]["message"]["content"] and "tool_calls" not in a["choices"][0]["message"]


def test_a_call_that_is_cut_is_no_call(server):
    a = post(server, tools=TOOLS, tool_choice="required", max_tokens=8).json()
    assert a["choices"][0]["finish_reason"] == "length" and a["usage"]["completion_tokens"] == 8


def test_a_schema_that_cannot_be_enforced(server):
    odd = tool("odd", x={"type": "string", "pattern": "(?=a)b"})
    r = post(server, tools=[odd, STAY], tool_choice="required", parallel_tool_calls=False)
    assert r.status_code == 200 and r.headers["X-Quire-Ignored"] == "tools.odd.parameters"
    odd["function"]["strict"] = True
    r = post(server, tools=[odd, STAY], tool_choice="required")
    assert r.status_code == 400 and r.json()["error"]["param"] == "tools" and "tools.odd.parameters" in r.json()["error"]["message"]


def test_tokens_of_calls_are_shown(server):
    fields = dict(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, logprobs=True, top_logprobs=2, return_token_ids=True, seed=2)
    a = post(server, **fields).json()
    choice, n = a["choices"][0], a["usage"]["completion_tokens"]
    assert len(choice["token_ids"]) == n and len(choice["prompt_token_ids"]) == a["usage"]["prompt_tokens"]
    assert len(choice["logprobs"]["content"]) >= n - 1  # not those of the end of the sequence
    ids, content, prompt = [], [], None
    for line in post(server, stream=True, **fields).text.splitlines():
        if line.startswith("data: {"):
            c = json.loads(line[6:])["choices"][0]
            ids += c.get("token_ids") or []
            content += (c["logprobs"] or {}).get("content") or []
            prompt = c.get("prompt_token_ids") or prompt
    assert (ids, content, prompt) == (choice["token_ids"], choice["logprobs"]["content"], choice["prompt_token_ids"])


# ---- reasoning ----

def test_reasoning_has_its_own_members(thinker):
    client = sdk(thinker)
    answer = ask(client, temperature=0, max_tokens=12)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 12
    message = answer.choices[0].message
    assert message.reasoning and message.reasoning == message.reasoning_content and not message.content
    s = Streamed(ask(client, temperature=0, max_tokens=12, stream=True))
    assert s.reasoning[0] == message.reasoning and s.text[0] == ""


def test_reasoning_can_be_switched_off(thinker):
    client = sdk(thinker)
    texts = []
    for fields in ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, {"reasoning_effort": "none"}):
        message = ask(client, temperature=0, max_tokens=12, **fields).choices[0].message
        assert message.content and not getattr(message, "reasoning", None)
        texts.append(message.content)
    assert texts[0] == texts[1]


def test_a_stop_string_in_reasoning(thinker):
    whole = post(thinker, temperature=0, max_tokens=12).json()["choices"][0]["message"]["reasoning"]
    stop = whole[5:8]
    c = post(thinker, temperature=0, max_tokens=12, stop=[stop]).json()["choices"][0]
    assert c["message"]["reasoning"] == whole[:whole.index(stop)] and c["finish_reason"] == "stop" and c["stop_reason"] == stop


def test_the_grammar_begins_after_the_reasoning(thinker):
    schema = {"type": "object", "properties": {"colour": {"enum": COLOURS}}, "required": ["colour"], "additionalProperties": False}
    fields = dict(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, temperature=0)
    free = post(thinker, temperature=0, max_tokens=20).json()["choices"][0]["message"]
    a = post(thinker, max_tokens=20, **fields).json()["choices"][0]
    assert a["message"]["reasoning"] == free["reasoning"] and not a["message"]["content"] and a["finish_reason"] == "length"
    a = post(thinker, reasoning_effort="none", **fields).json()["choices"][0]
    assert json.loads(a["message"]["content"])["colour"] in COLOURS and a["finish_reason"] == "stop", a


# ---- bad input ----

@pytest.mark.parametrize("fields, param, part", [
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools", "'custom'"),
    ({"tools": TOOLS + [STAY]}, "tools", "of another one"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "jump"}}}, "tool_choice", "'jump'"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"messages": HELLO + [{"role": "tool", "tool_call_id": "a", "content": "x"}]}, "messages", "'a'"),
    ({"messages": HELLO + [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}]}]}, "messages", "no string of JSON"),
    ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs", "does not go with tools"),
])
def test_refusals(server, fields, param, part):
    r = post(server, **fields)
    assert r.status_code == 400 and r.json()["error"]["param"] == param and part in r.json()["error"]["message"], r.text


def test_a_format_that_is_not_known(start, tmp_path):
    model_with(tmp_path / "demo", HERMES)
    s = start("--chat-format", "morse", "--device", "cpu", "--kv-cache-memory", "64MiB", model=str(tmp_path / "demo"), wait=False)
    assert s.process.wait(60) == 1 and "morse" in s.log and "hermes" in s.log


def test_a_template_without_tools_refuses_or_describes_them(tmp_path_factory):
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "stay", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "It stays."}]
    body = {"messages": messages, "tools": TOOLS, "tool_choice": "required", "seed": 3}
    for flags in ([], ["--generic-tools"]):
        for s in serve(tmp_path_factory, "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>", *flags):
            r = post(s, **body)
            if not flags:
                assert r.status_code == 400 and "no place for tools" in r.json()["error"]["message"], r.text
                continue
            choice = r.json()["choices"][0]
            assert choice["finish_reason"] == "tool_calls", r.text
            for call in choice["message"]["tool_calls"]:
                arguments = json.loads(call["function"]["arguments"])
                assert call["function"]["name"] in ("paint", "stay")
                assert set(arguments) == ({"colour", "coats"} if call["function"]["name"] == "paint" else set())


def nested(levels):
    return {"a": nested(levels - 1)} if levels > 1 else {}


@pytest.mark.parametrize("path, body, where", (
    ("/v1/chat/completions", lambda schema: {
        "messages": HELLO, "tools": [PAINT, {"type": "function", "function": {"name": "f", "parameters": schema}}]},
     "tools[1].function.parameters"),
    ("/v1/responses", lambda schema: {
        "input": "hi", "tools": [{"type": "function", "name": "f", "parameters": schema}]}, "tools[0].parameters"),
    ("/v1/messages", lambda schema: {
        "messages": HELLO, "max_tokens": 5, "tools": [{"name": "f", "input_schema": schema}]}, "tools[0].input_schema")))
def test_a_schema_that_nests_too_deep_is_named(server, path, body, where):
    answer = server.ask("POST", path, json={"model": "demo"} | body(nested(61)))
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"].startswith(where + " nests deeper than 60 levels"), error
    assert error.get("param", "tools") == "tools"
