"""Conversations as coding agents hold them, by /v1/messages and /v1/responses: what they call, and what of each turn is
computed again."""
import importlib.util
import json
import re
import os
from typing import Literal

import pytest

from chat_models import HERMES, REASONING, model_with
from conftest import ROOT, serving

spec = importlib.util.spec_from_file_location("agent_trace", os.path.join(ROOT, "tests", "bench", "agent_trace.py"))
agent_trace = importlib.util.module_from_spec(spec)
spec.loader.exec_module(agent_trace)


@pytest.fixture(scope="module")
def agent_server(tmp_path_factory):
    model = agent_trace.demo_with_template(tmp_path_factory.mktemp("agents"), length=4096)
    with serving("--served-model-name", "demo", "--kv-cache-memory", "64MiB", "--device", "cpu", model=model) as s:
        yield s


@pytest.mark.parametrize("api", ["messages", "responses", "chat"])
def test_turns_compute_little_again(agent_server, api):
    """The bar is 3 % of all prompt tokens. Attribution headers change, system messages come late, and the model's own
    answers are part of the history."""
    rows = agent_trace.run(agent_server, api, "demo", turns=33, first=500, last=3600)
    prompts = [row[0] for row in rows]
    assert prompts == sorted(prompts) and prompts[-1] > 3000
    assert agent_trace.share_computed_again(rows) <= 0.03, rows


def test_tools_are_rendered_in_the_order_sent(agent_server):
    count = lambda trace: agent_server.ask("POST", "/v1/messages/count_tokens", json=trace.body()).json()["input_tokens"]
    trace = agent_trace.Trace("messages", "demo")
    n = count(trace)
    cold = agent_server.ask("POST", "/v1/messages", json=trace.body(cache_salt="order")).json()["usage"]
    warm = agent_server.ask("POST", "/v1/messages", json=trace.body(cache_salt="order")).json()["usage"]
    assert cold["input_tokens"] == n and warm["cache_read_input_tokens"] == (n - 1) // 16 * 16
    trace.tools.reverse()
    other = agent_server.ask("POST", "/v1/messages", json=trace.body(cache_salt="order")).json()["usage"]
    assert other["cache_read_input_tokens"] < warm["cache_read_input_tokens"]


HELLO = [{"role": "user", "content": "Once upon a time there was a little dog."}]
SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"], "additionalProperties": False}
# The model calls where the grammar makes it, and chooses among what that allows.
CALL = {
    "messages": {"max_tokens": 400, "seed": 1, "messages": HELLO, "tools": [{"name": "paint", "input_schema": SCHEMA}],
                 "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    "responses": {"max_output_tokens": 400, "seed": 1, "input": HELLO, "tool_choice": "required", "parallel_tool_calls": False,
                  "tools": [{"type": "function", "name": "paint", "parameters": SCHEMA}]},
}


def serving_template(tmp_path_factory, template):
    model = model_with(tmp_path_factory.mktemp("agents") / "demo", template)
    return serving("--served-model-name", "demo", "--kv-cache-memory", "64MiB", "--device", "cpu", model=model)


@pytest.fixture(scope="module")
def tools_server(tmp_path_factory):
    with serving_template(tmp_path_factory, HERMES) as s:
        yield s


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    with serving_template(tmp_path_factory, REASONING) as s:
        yield s


def ask(server, api, **fields):
    a = server.ask("POST", "/v1/" + api, json=fields)
    assert a.status_code == 200, a.text
    return a


def events(answer):
    """The events' data, without the closing [DONE]."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_a_call_by_messages(tools_server):
    m = ask(tools_server, "messages", **CALL["messages"]).json()
    call, = [b for b in m["content"] if b["type"] == "tool_use"]
    assert m["stop_reason"] == "tool_use" and call["name"] == "paint" and call["input"]["colour"] in SCHEMA["properties"]["colour"]["enum"]
    e = events(ask(tools_server, "messages", stream=True, **CALL["messages"]))
    start, = [x for x in e if x["type"] == "content_block_start" and x["content_block"]["type"] == "tool_use"]
    deltas = [x["delta"] for x in e if x["type"] == "content_block_delta" and x["index"] == start["index"]]
    assert {d["type"] for d in deltas} == {"input_json_delta"} and start["content_block"]["input"] == {}
    assert set(json.loads("".join(d["partial_json"] for d in deltas))) == {"colour"}
    assert e[-2]["delta"]["stop_reason"] == "tool_use"
    back = HELLO + [{"role": "assistant", "content": m["content"]}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "done"}]}]}]
    again = ask(tools_server, "messages", **CALL["messages"] | {"messages": back, "tool_choice": {"type": "none"}, "max_tokens": 8}).json()
    assert [b["type"] for b in again["content"]] == ["text"]


def test_a_call_by_responses(tools_server):
    r = ask(tools_server, "responses", **CALL["responses"]).json()
    call, = [i for i in r["output"] if i["type"] == "function_call"]
    assert r["status"] == call["status"] == "completed" and call["name"] == "paint"
    assert set(json.loads(call["arguments"])) == {"colour"}
    e = events(ask(tools_server, "responses", stream=True, **CALL["responses"]))
    done, = [x for x in e if x["type"] == "response.function_call_arguments.done"]
    deltas = [x["delta"] for x in e if x["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == done["arguments"] and set(json.loads(done["arguments"])) == {"colour"}
    added, = [x["item"] for x in e if x["type"] == "response.output_item.added" and x["item"]["type"] == "function_call"]
    assert added["id"] == done["item_id"] and added["call_id"] and added["name"] == "paint" and added["arguments"] == ""
    back = HELLO + r["output"] + [{"type": "function_call_output", "call_id": call["call_id"], "output": "done"}]
    again = ask(tools_server, "responses", **CALL["responses"] | {"input": back, "tool_choice": "none", "max_output_tokens": 8}).json()
    assert [i["type"] for i in again["output"]] == ["message"]


def test_a_call_that_was_cut_can_be_sent_back(tools_server):
    fields, n = CALL["responses"] | {"temperature": 0}, 1
    while True:
        r = ask(tools_server, "responses", **fields | {"max_output_tokens": n}).json()
        cut = [i for i in r["output"] if i["type"] == "function_call" and i["arguments"]]
        if cut:
            break
        n += 1
    assert r["status"] == "incomplete" and not cut[0]["arguments"].endswith("}")
    back = HELLO + r["output"] + [{"type": "function_call_output", "call_id": cut[0]["call_id"], "output": "no JSON"}]
    again = ask(tools_server, "responses", **fields | {"input": back, "tool_choice": "none", "max_output_tokens": 8})
    assert again.status_code == 200, again.text


@pytest.mark.parametrize("api, fields", [
    ("messages", {"tool_choice": {"type": "tool", "name": "other"}}),
    ("responses", {"tool_choice": {"type": "function", "name": "other"}}),
    ("messages", {"tools": [{"name": "paint", "input_schema": 7}]}),
    ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),  # left out, and then none is left to call
    ("responses", {"tools": [{"type": "function", "parameters": {}}]}),
    ("responses", {"tools": [{"type": "web_search"}]}),
    ("messages", {"messages": HELLO + [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}),
    ("responses", {"input": HELLO + [{"type": "function_call_output", "call_id": "x", "output": ""}]}),
])
def test_refusals_of_tools(tools_server, api, fields):
    a = tools_server.ask("POST", "/v1/" + api, json=CALL[api] | fields)
    assert a.status_code == 400 and a.json()["error"]["type"] == "invalid_request_error", a.text


def test_reasoning_by_messages(thinker):
    body = {"max_tokens": 8, "temperature": 0, "messages": HELLO}
    m = ask(thinker, "messages", thinking={"type": "enabled", "budget_tokens": 1024}, **body).json()
    block, = m["content"]
    assert block["type"] == "thinking" and block["thinking"] and block["signature"]
    e = events(ask(thinker, "messages", stream=True, **body))
    assert e[2]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert "".join(x["delta"].get("thinking", "") for x in e if x["type"] == "content_block_delta") == block["thinking"]
    plain = ask(thinker, "messages", thinking={"type": "disabled"}, **body).json()
    assert [b["type"] for b in plain["content"]] == ["text"]
    # past reasoning reaches the template
    turns = HELLO + [{"role": "assistant", "content": [block, {"type": "text", "text": "Yes."}]}] + HELLO
    bare = HELLO + [{"role": "assistant", "content": "Yes."}] + HELLO
    count = [ask(thinker, "messages/count_tokens", messages=x).json()["input_tokens"] for x in (turns, bare)]
    assert count[0] > count[1]


def test_reasoning_by_responses(thinker):
    body = {"max_output_tokens": 8, "temperature": 0, "input": HELLO}
    r = ask(thinker, "responses", **body).json()
    item, = r["output"]
    assert item["type"] == "reasoning" and item["summary"] == [] and item["content"][0]["type"] == "reasoning_text"
    assert r["usage"]["output_tokens_details"]["reasoning_tokens"] == r["usage"]["output_tokens"] == 8
    e = events(ask(thinker, "responses", stream=True, **body))
    text = "".join(x["delta"] for x in e if x["type"] == "response.reasoning_text.delta")
    assert text == item["content"][0]["text"] and e[-1]["response"]["output"][0]["content"] == item["content"]
    plain = ask(thinker, "responses", reasoning={"effort": "none"}, **body).json()
    assert [i["type"] for i in plain["output"]] == ["message"]
    assert plain["usage"]["output_tokens_details"]["reasoning_tokens"] == 0
    turns = HELLO + [item, {"role": "assistant", "content": "Yes."}] + HELLO
    bare = HELLO + [{"role": "assistant", "content": "Yes."}] + HELLO
    count = [ask(thinker, "responses/input_tokens", input=x).json()["input_tokens"] for x in (turns, bare)]
    assert count[0] > count[1]


# How clients know that they should shorten the conversation and try again: opencode, Cline,
# LiteLLM and Continue, LangChain, Claude Code.
TOO_LONG = (r"maximum context length is \d+ tokens", r"\bcontext\s*(?:length|window|limit)\b",
            r"this model's maximum context length is", r"prompt is too long", r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)")


@pytest.mark.parametrize("api, fields, param", [
    ("chat/completions", {"messages": HELLO * 300}, "messages"),
    ("responses", {"input": HELLO * 300}, "input"),
    ("messages", {"messages": HELLO * 300, "max_tokens": 4}, None),
    ("messages/count_tokens", {"messages": HELLO * 300}, None),
    ("completions", {"prompt": [1] * 2000}, "prompt"),
])
def test_what_is_too_long_is_known_by_its_words(tools_server, api, fields, param):
    limit = tools_server.ask("GET", "/v1/models").json()["data"][0]["max_model_len"]
    a = tools_server.ask("POST", "/v1/" + api, json=fields)
    error = a.json()["error"]
    assert a.status_code == 400 and error["type"] == "invalid_request_error" and error.get("param") == param
    for pattern in TOO_LONG:
        assert re.search(pattern, error["message"], re.I), (pattern, error)
    asked, most = re.search(TOO_LONG[-1], error["message"]).groups()
    assert int(asked) > int(most) == limit


def test_answers_in_a_format(tools_server):
    r = ask(tools_server, "responses", input=HELLO, seed=1, max_output_tokens=400, text={"format": {
        "type": "json_schema", "name": "colour", "schema": SCHEMA, "strict": True}}).json()
    assert set(json.loads(r["output"][0]["content"][0]["text"])) == {"colour"}
    m = ask(tools_server, "messages", messages=HELLO, seed=1, max_tokens=400, output_config={"format": {
        "type": "json_schema", "schema": SCHEMA}}).json()
    assert set(json.loads(m["content"][0]["text"])) == {"colour"}
    a = tools_server.ask("POST", "/v1/responses", json={"input": HELLO, "text": {"format": {"type": "json_schema", "name": "x"}}})
    assert a.status_code == 400 and a.json()["error"]["param"]


def test_sdks_run_a_call(tools_server):
    openai = pytest.importorskip("openai")
    r = openai.OpenAI(base_url=tools_server.url + "/v1", api_key="none", max_retries=0).responses.create(
        model="demo", extra_body={"seed": 1}, **{k: v for k, v in CALL["responses"].items() if k != "seed"})
    assert [i.type for i in r.output if i.type != "message"] == ["function_call"]
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
    client = anthropic.Anthropic(base_url=tools_server.url, api_key="none", max_retries=0)
    fields = {k: v for k, v in CALL["messages"].items() if k != "seed"} | {"model": "demo", "extra_body": {"seed": 1}}
    with client.messages.stream(**fields) as stream:
        last = stream.get_final_message()
    assert last.stop_reason == "tool_use" and set(last.content[-1].input) == {"colour"}


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_agents_sdk_runs_a_tool(tools_server, api):
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    import openai
    agents.set_tracing_disabled(True)
    painted = []

    @agents.function_tool
    def paint(colour: Literal["red", "green"]) -> str:
        """Paint it."""
        painted.append(colour)
        return "done in " + colour

    sdk = openai.AsyncOpenAI(base_url=tools_server.url + "/v1", api_key="none", max_retries=0)
    model = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
    agent = agents.Agent(name="painter", model=model("demo", sdk), tools=[paint], tool_use_behavior="stop_on_first_tool",
                         model_settings=agents.ModelSettings(temperature=0, tool_choice="required", max_tokens=200, parallel_tool_calls=False))
    done = agents.Runner.run_sync(agent, HELLO[0]["content"], max_turns=2)
    assert len(painted) == 1 and done.final_output == "done in " + painted[0]


def test_objects_are_those_of_the_sdks(tools_server, thinker):
    """The SDKs read answers leniently; here every object and event must be of their types."""
    pytest.importorskip("anthropic", reason="anthropic is not installed")
    from anthropic.types import Message, RawMessageStreamEvent
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    for api, whole, event in (("messages", Message, RawMessageStreamEvent), ("responses", Response, ResponseStreamEvent)):
        body = {"messages": {"messages": HELLO, "max_tokens": 4}, "responses": {"input": HELLO, "max_output_tokens": 4}}[api]
        for server, fields in ((tools_server, CALL[api]), (tools_server, body), (thinker, body)):
            TypeAdapter(whole).validate_python(ask(server, api, **fields).json())
            for e in events(ask(server, api, stream=True, **fields)):
                if e["type"] != "ping":  # which Anthropic's SDK passes over
                    TypeAdapter(event).validate_python(e)
