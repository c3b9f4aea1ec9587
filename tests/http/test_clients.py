"""Popular clients against the null model and, for chats, the demo model; each is skipped if it is not installed.

The Python ones are large, so scripts/check does not install them:
build/venv/bin/pip install langchain-openai langchain-anthropic litellm mcp
(LiteLLM may need another version of openai than scripts/requirements.txt; then use a separate virtual environment.)
"""
import asyncio
import json
import os
import re
import shutil
import subprocess

import anthropic
import openai
import pytest

from conftest import PATIENCE_S
from raw import events
from test_agents import SCHEMA, tools_server  # noqa: F401  (a fixture)
from test_chat import HELLO, chat  # noqa: F401  (a fixture)

PAINT = {"type": "function", "function": {"name": "paint", "description": "Paint it.", "parameters": SCHEMA}}

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for a list of prices


def test_langchain_completions(server):
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    llm = langchain.OpenAI(model="null", base_url=server.url + "/v1", api_key="none", max_tokens=20, seed=1, max_retries=0)
    whole = llm.invoke("hello")
    assert len(whole) == 20 and "".join(llm.stream("hello")) == whole
    assert len(llm.batch(["a", "b", "c"])) == 3
    assert len(llm.generate(["a", "b"]).generations) == 2


def test_langchain_chat(chat):
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    common = dict(model="demo", base_url=chat.url + "/v1", api_key="none", temperature=0, max_retries=0)
    llm = langchain.ChatOpenAI(max_tokens=12, **common)
    whole = llm.invoke(HELLO)
    assert whole.usage_metadata["output_tokens"] == 12 and whole.response_metadata["finish_reason"] == "length"
    assert "".join(p.content for p in llm.stream(HELLO)) == whole.content == asyncio.run(llm.ainvoke(HELLO)).content
    assert len(llm.batch([HELLO, HELLO])) == 2
    scored = langchain.ChatOpenAI(max_tokens=3, logprobs=True, top_logprobs=2, **common).invoke(HELLO)
    assert len(scored.response_metadata["logprobs"]["content"]) == 3


def test_langchain_output_by_a_schema(tools_server):
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    for responses in (False, True):
        llm = langchain.ChatOpenAI(model="demo", base_url=tools_server.url + "/v1", api_key="none", temperature=0, max_retries=0,
                                   max_tokens=200, use_responses_api=responses)
        for method in ("json_schema", "function_calling"):
            made = llm.with_structured_output(SCHEMA | {"title": "paint"}, method=method).invoke(HELLO)
            assert set(made) == {"colour"} and made["colour"] in SCHEMA["properties"]["colour"]["enum"]
        calls = llm.bind_tools([PAINT], tool_choice="paint").invoke(HELLO).tool_calls
        assert calls and {c["name"] for c in calls} == {"paint"} and set(calls[0]["args"]) == {"colour"}


def test_langchain_output_in_json_mode(tools_server):
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    [closing] = tools_server.ask("POST", "/tokenize", json={"prompt": "}", "add_special_tokens": False}).json()["tokens"]
    llm = langchain.ChatOpenAI(model="demo", base_url=tools_server.url + "/v1", api_key="none", temperature=0, max_retries=0,
                               max_tokens=20, logit_bias={closing: 100})
    assert llm.with_structured_output(None, method="json_mode").invoke(HELLO) == {}


def test_langchain_by_messages(tools_server):
    langchain = pytest.importorskip("langchain_anthropic", reason="langchain-anthropic is not installed")
    llm = langchain.ChatAnthropic(model="demo", base_url=tools_server.url, api_key="none", max_tokens=200, max_retries=0)
    said = llm.invoke(HELLO, max_tokens=8)
    assert said.content and said.usage_metadata["output_tokens"] == 8
    calls = llm.bind_tools([PAINT], tool_choice="paint").invoke(HELLO).tool_calls
    assert calls and {c["name"] for c in calls} == {"paint"} and set(calls[0]["args"]) == {"colour"}


def litellm_chat(litellm, server, **fields):
    return litellm.completion(messages=HELLO, api_base=server.url + "/v1", api_key="none", temperature=0, max_tokens=12, num_retries=0,
                              **fields)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_chat(chat, provider):
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    whole = litellm_chat(litellm, chat, model=provider + "/demo")
    parts = list(litellm_chat(litellm, chat, model=provider + "/demo", stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == whole.choices[0].message.content
    assert whole.usage.completion_tokens == 12
    with pytest.raises(litellm.NotFoundError):
        litellm_chat(litellm, chat, model=provider + "/other")


def test_litellm_calls(tools_server):
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    ask = dict(model="hosted_vllm/demo", api_base=tools_server.url + "/v1", api_key="none", temperature=0, max_tokens=200, num_retries=0,
               messages=HELLO)
    one = {k: v for k, v in SCHEMA.items() if k != "additionalProperties"} | {"maxProperties": 1}  # LiteLLM leaves the other one out
    tool = {"type": "function", "function": PAINT["function"] | {"parameters": one}}
    calls = litellm.completion(tools=[tool], tool_choice="required", **ask).choices[0].message.tool_calls
    assert calls[0].function.name == "paint" and set(json.loads(calls[0].function.arguments)) == {"colour"}
    form = {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA, "strict": True}}
    assert set(json.loads(litellm.completion(response_format=form, **ask).choices[0].message.content)) == {"colour"}


def test_litellm_completions(server):
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    ask = dict(model="text-completion-openai/null", prompt="hello", api_base=server.url + "/v1", api_key="none", max_tokens=20,
               seed=1, num_retries=0)
    whole = litellm.text_completion(**ask)
    assert len(whole.choices[0].text) == 20 and whole.usage.completion_tokens == 20
    parts = [p.choices[0].text or "" for p in litellm.text_completion(stream=True, **ask)]
    assert "".join(parts) == whole.choices[0].text


def test_benchmark_by_url(server):
    """The requests that other servers' benchmark clients send to /v1/completions, and the fields that they read."""
    body = {"model": "null", "prompt": "hello " * 20, "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 30, "logprobs": None,
            "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "best_of": 1, "n": 1}
    a = server.ask("POST", "/v1/completions", json=body, headers={"Authorization": "Bearer none"})
    payloads = events(a.content)
    assert a.status_code == 200 and "x-quire-ignored" not in a.headers and payloads[-1] == "[DONE]"
    pieces = [json.loads(p) for p in payloads[:-1]]
    assert pieces[-1]["choices"] == [] and pieces[-1]["usage"]["completion_tokens"] == 30
    assert all(p["choices"][0]["text"] for p in pieces[:-1])


@pytest.mark.parametrize("tool, arguments, failed", [
    ("ab", ["-q", "-k", "-n", "200", "-c", "8", "-T", "application/json", "-p", "BODY"], r"(?:Failed requests|Non-2xx responses):\s+[1-9]"),
    ("hey", ["-n", "200", "-c", "8", "-m", "POST", "-T", "application/json", "-D", "BODY"], r"\[[345]\d\d\]|Error distribution"),
    ("wrk", ["-d", "1s", "-c", "8", "-t", "1"], r"Non-2xx|Socket errors: connect [1-9]"),
])
def test_load_generators(server, tmp_path, tool, arguments, failed):
    if not shutil.which(tool):
        pytest.skip(f"{tool} is not installed")
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"prompt": "x", "max_tokens": 5}))
    path = "/health" if tool == "wrk" else "/v1/completions"
    done = subprocess.run([tool, *(str(body) if a == "BODY" else a for a in arguments), server.url + path], capture_output=True,
                          text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and not re.search(failed, done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize("size", (9_000, 20_000))
def test_sdks_tell_the_status_of_a_head_that_is_too_large(server, size):
    """Of the larger one libmicrohttpd itself, whose page is no JSON (docs/operations.md)."""
    asked = {"X-A": "a" * size}
    with pytest.raises(openai.APIStatusError) as error:
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0).models.list(extra_headers=asked)
    assert error.value.status_code == 431
    with pytest.raises(anthropic.APIStatusError) as error:
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0).models.list(extra_headers=asked)
    assert error.value.status_code == 431
