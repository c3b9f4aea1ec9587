"""The requests that coding agents send, field by field: two turns each, the second with the
call that the first made and its result. Claude Code speaks /v1/messages, Codex
/v1/responses, opencode, Cline and Continue /v1/chat/completions; all of them stream.
"""

import json

import httpx
import pytest

from test_agents import events, tools_server  # noqa: F401  (a fixture)

# Schemas as their tools carry them: drafts by URL, enums, bounds, nested objects.
READ = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "file_path": {"type": "string", "description": "The absolute path"},
        "offset": {"type": "number", "description": "The first line"},
        "limit": {"type": "number"},
    },
    "required": ["file_path"],
}
PLAN = {
    "type": "object",
    "properties": {
        "todos": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "content": {"type": "string", "minLength": 1},
                    "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                },
                "required": ["content", "status"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["todos"],
    "additionalProperties": False,
}


def send(server, path, body, **headers):
    a = httpx.post(
        server.url + path, json=body, timeout=120, headers={"user-agent": "agent/1.0"} | headers
    )
    assert a.status_code == 200, a.text
    return a


CLAUDE_CODE = {
    "model": "demo",
    "max_tokens": 32000,
    "stream": True,
    "temperature": 1,
    "metadata": {"user_id": "user_0_account__session_1"},
    "system": [
        {
            "type": "text",
            "text": "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli; cch=1a2b3;",
        },
        {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
        {
            "type": "text",
            "text": "Work in /src.",
            "cache_control": {"type": "ephemeral", "ttl": "1h"},
        },
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Today is Monday.</system-reminder>"},
                {"type": "text", "text": "Read it.", "cache_control": {"type": "ephemeral"}},
            ],
        }
    ],
    "tools": [
        {"name": "Read", "description": "Reads a file.", "input_schema": READ},
        {
            "name": "TodoWrite",
            "description": "Keeps a list.",
            "input_schema": PLAN,
            "cache_control": {"type": "ephemeral"},
        },
    ],
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
}
CLAUDE_HEADERS = {
    "x-api-key": "none",
    "anthropic-version": "2023-06-01",
    "x-app": "cli",
    "anthropic-dangerous-direct-browser-access": "true",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,"
    "context-management-2025-06-27",
}


def test_claude_code(tools_server):
    body = CLAUDE_CODE | {"stop_sequences": ["e"]}  # an answer that ends soon
    first = events(send(tools_server, "/v1/messages?beta=true", body, **CLAUDE_HEADERS))
    assert [first[0]["type"], first[-1]["type"]] == ["message_start", "message_stop"]
    turn = [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look first.", "signature": "c2ln"},
                {"type": "text", "text": "I read it."},
                {
                    "type": "tool_use",
                    "id": "toolu_01",
                    "name": "Read",
                    "input": {"file_path": "/src/a.c"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_01",
                    "is_error": False,
                    "cache_control": {"type": "ephemeral"},
                    "content": [{"type": "text", "text": "     1\tint x;"}],
                },
                {"type": "text", "text": "<system-reminder>Be careful.</system-reminder>"},
            ],
        },
    ]
    more = body | {"messages": body["messages"] + turn}
    second = events(send(tools_server, "/v1/messages?beta=true", more, **CLAUDE_HEADERS))
    used = second[0]["message"]["usage"]
    assert (
        used["cache_read_input_tokens"] > used["input_tokens"]
    )  # the first turn's prompt is not computed again
    count = {k: more[k] for k in ("model", "system", "messages", "tools", "thinking")}
    n = send(tools_server, "/v1/messages/count_tokens?beta=true", count, **CLAUDE_HEADERS).json()[
        "input_tokens"
    ]
    assert n == used["cache_read_input_tokens"] + used["input_tokens"]


CODEX = {
    "model": "demo",
    "instructions": "You are a coding agent.",
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213-81c0-7800",
    "text": {"verbosity": "medium"},
    "service_tier": "auto",
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "array", "items": {"type": "string"}},
                    "timeout_ms": {"type": "number"},
                },
                "required": ["command"],
                "additionalProperties": False,
            },
        },
        {"type": "web_search", "external_web_access": False},
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Patches.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
        },
    ],
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>All.</permissions>"}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [
                {
                    "type": "input_text",
                    "text": "<environment_context><cwd>/src</cwd></environment_context>",
                }
            ],
        },
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "List it."}],
        },
    ],
}


def test_codex(tools_server):
    body = CODEX | {"stop": "e"}
    first = send(
        tools_server, "/v1/responses", body, originator="codex_cli_rs", session_id="0199a213"
    )
    assert first.headers["x-quire-ignored"].split(", ") == ["tools.web_search", "tools.custom"]
    e = events(first)
    assert e[0]["type"] == "response.created" and e[-1]["type"] == "response.completed"
    assert [x["sequence_number"] for x in e] == list(range(len(e)))
    turn = [
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I list it."}],
        },
        {
            "type": "function_call",
            "name": "shell",
            "arguments": json.dumps({"command": ["ls"]}),
            "call_id": "call_1",
        },
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": json.dumps({"output": "a.c\n", "metadata": {"exit_code": 0}}),
        },
    ]
    last = events(send(tools_server, "/v1/responses", body | {"input": body["input"] + turn}))[-1][
        "response"
    ]
    assert last["usage"]["input_tokens_details"]["cached_tokens"] > 0 and last["store"] is False


OPENCODE = {
    "model": "demo",
    "max_tokens": 60,
    "temperature": 0,
    "top_p": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tool_choice": "auto",
    "messages": [
        {"role": "system", "content": "You are opencode."},
        {"role": "system", "content": "<env>/src</env>"},
        {"role": "user", "content": [{"type": "text", "text": "Read it."}]},
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": "read", "description": "Reads a file.", "parameters": READ},
        },
        {
            "type": "function",
            "function": {"name": "todowrite", "description": "Keeps a list.", "parameters": PLAN},
        },
    ],
}


def test_opencode(tools_server):
    first = events(
        send(tools_server, "/v1/chat/completions", OPENCODE, authorization="Bearer none")
    )
    assert first[-1]["choices"] == [] and first[-1]["usage"]["completion_tokens"] <= 60
    turn = [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Look.",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "read", "arguments": '{"file_path":"/src/a.c"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "<file>\n00001| int x;\n</file>"},
    ]
    second = events(
        send(
            tools_server,
            "/v1/chat/completions",
            OPENCODE | {"messages": OPENCODE["messages"] + turn},
        )
    )
    assert second[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    # A summary is asked for with the calls in its history but without tools; with `setCacheKey`
    # there is a member that no server of this API knows.
    summary = {k: v for k, v in OPENCODE.items() if k not in ("tools", "tool_choice")}
    summary |= {"messages": OPENCODE["messages"] + turn, "promptCacheKey": "ses_1"}
    third = send(tools_server, "/v1/chat/completions", summary)
    assert third.headers["x-quire-ignored"] == "promptCacheKey"
    assert not read_as_sdk(third)[1]


def read_as_sdk(answer):
    """A stream as the AI SDK reads it, which opencode and Cline use: (text, calls, the last finish
    reason). It refuses the first piece of a call without a name, and a stream without a reason."""
    pieces = events(answer)
    text, calls, reason = "", {}, None
    for piece in pieces:
        assert {"id", "created", "model", "choices"} <= set(piece) and "error" not in piece
        for choice in piece["choices"]:
            reason = choice["finish_reason"] or reason
            delta = choice["delta"]
            assert delta.get("role") in (None, "assistant")
            text += delta.get("content") or ""
            for part in delta.get("tool_calls") or []:
                if part["index"] not in calls:
                    assert part["id"] and part["type"] == "function"
                    calls[part["index"]] = [part["function"]["name"], ""]
                calls[part["index"]][1] += part["function"].get("arguments") or ""
    assert reason and pieces[-1]["usage"]["total_tokens"] > 0
    return text, calls, reason


# Through the AI SDK: members that are not set are not sent, an assistant's content is null beside
# calls, results are text or JSON as text, and each turn's reasoning comes back.
CLINE = {
    "model": "demo",
    "max_tokens": 400,
    "temperature": 0,
    "reasoning_effort": "medium",
    "stream": True,
    "stream_options": {"include_usage": True},
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "messages": [
        {"role": "system", "content": "You are Cline."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<task>Read it.</task>"},
                {"type": "text", "text": "<environment_details>/src</environment_details>"},
            ],
        },
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "plan",
                "description": "Keeps a list.",
                "parameters": {
                    "$schema": "http://json-schema.org/draft-07/schema#",
                    "type": "object",
                    "properties": {"status": {"type": "string", "enum": ["open", "done"]}},
                    "required": ["status"],
                    "additionalProperties": False,
                },
            },
        }
    ],
}
CLINE_HEADERS = {
    "authorization": "Bearer none",
    "HTTP-Referer": "https://cline.bot",
    "X-Title": "Cline",
    "user-agent": "ai-sdk/openai-compatible/2.0.0 ai-sdk/provider-utils/4.0.0 runtime/node.js/22",
}


def test_cline(tools_server):
    first = send(tools_server, "/v1/chat/completions", CLINE, **CLINE_HEADERS)
    assert "x-quire-ignored" not in first.headers
    _, calls, reason = read_as_sdk(first)
    [(name, arguments)] = calls.values()
    assert reason == "tool_calls" and name == "plan"
    assert json.loads(arguments)["status"] in ("open", "done")
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    turn = [
        {"role": "assistant", "content": None, "reasoning_content": "Plan.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": '[{"type":"text","text":"kept"}]'},
        {"role": "user", "content": "<environment_details>/src</environment_details>"},
    ]
    more = CLINE | {"messages": CLINE["messages"] + turn, "tool_choice": "auto", "stop": ["."]}
    answer = send(tools_server, "/v1/chat/completions", more, **CLINE_HEADERS)
    text, calls, reason = read_as_sdk(answer)
    assert reason == "stop" and not calls and text
    used = events(answer)[-1]["usage"]
    assert used["prompt_tokens_details"]["cached_tokens"] > 0


# Content is never empty but a blank, both ways of giving a key are used at once, and members
# without a value are null.
CONTINUE = {
    "model": "demo",
    "max_tokens": 60,
    "temperature": 0.5,
    "top_p": None,
    "frequency_penalty": None,
    "presence_penalty": None,
    "stop": ["/src/", "."],
    "prediction": None,
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [
        {"role": "system", "content": "<important_rules>Agent mode.</important_rules>"},
        {"role": "user", "content": "Read it."},
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": "read_file", "description": "Reads a file.", "parameters": READ},
        },
        {
            "type": "function",
            "function": {
                "name": "edit_plan",
                "description": "Keeps a list.",
                "parameters": PLAN,
                "strict": False,
            },
        },
    ],
}


def test_continue(tools_server):
    headers = {"authorization": "Bearer none", "x-api-key": "none"}
    first = send(tools_server, "/v1/chat/completions", CONTINUE, **headers)
    assert "x-quire-ignored" not in first.headers
    read_as_sdk(first)
    call = {"name": "read_file", "arguments": '{"file_path":"a.c"}'}
    turn = [
        {
            "role": "assistant",
            "content": " ",
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
            "reasoning_content": "",
        },
        {"role": "tool", "content": "int x;", "tool_call_id": "call_1"},
    ]
    more = CONTINUE | {"messages": CONTINUE["messages"] + turn}
    answer = events(send(tools_server, "/v1/chat/completions", more, **headers))
    assert answer[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    # An edit is asked for without tools, with the expected text as a prediction.
    edit = {k: v for k, v in CONTINUE.items() if k != "tools"}
    edit |= {"prediction": {"type": "content", "content": "int x;"}, "stream": False}
    del edit["stream_options"]
    answer = send(tools_server, "/v1/chat/completions", edit, **headers).json()
    assert answer["choices"][0]["message"]["content"]


# What some version of Codex requires of a model, by type; it drops the list where a member
# is missing.
CODEX_MODEL = {
    "slug": str,
    "display_name": str,
    "supported_reasoning_levels": list,
    "shell_type": str,
    "visibility": str,
    "supported_in_api": bool,
    "priority": int,
    "base_instructions": str,
    "supports_reasoning_summaries": bool,
    "support_verbosity": bool,
    "truncation_policy": dict,
    "supports_parallel_tool_calls": bool,
    "context_window": int,
    "experimental_supported_tools": list,
    "input_modalities": list,
}


def test_models_have_what_codex_reads(tools_server):
    answer = tools_server.ask("GET", "/v1/models?client_version=0.150.0").json()
    [model] = answer["models"]
    for name, kind in CODEX_MODEL.items():
        assert type(model[name]) is kind, name
    served = answer["data"][0]
    assert model["slug"] == model["display_name"] == served["id"]
    assert model["context_window"] == model["max_context_window"] == served["max_model_len"]
    assert (
        model["shell_type"] == "shell_command"
        and model["visibility"] == "list"
        and model["input_modalities"] == ["text"]
    )
    assert (
        model["truncation_policy"]["mode"] == "tokens"
        and 0 < model["truncation_policy"]["limit"] <= served["max_model_len"] // 4
    )
    assert model["base_instructions"] == model["model_messages"]["instructions_template"] != ""


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models?client_version=0.50.0"])
def test_models_have_what_clients_read(tools_server, path):
    answer = tools_server.ask("GET", path).json()
    model = answer["data"][0]
    assert answer["first_id"] == answer["last_id"] == model["id"]
    assert model["max_model_len"] == model["context_length"] == model["context_window"]


# ---- errors: fields and entries are those of the body that was sent ----

ORPHAN = {"type": "function_call_output", "call_id": "c", "output": "7"}
NO_TEXT = {"type": "function_call", "call_id": "c", "name": "f", "arguments": [1]}
WRONG = {"type": "no"}
F = {"name": "f", "parameters": {}}


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"input": [{"role": "user", "content": "x"}, ORPHAN]}, "input", "input[1] answers the call 'c'"),
        ({"input": [{"role": "user", "content": "x"}, NO_TEXT]}, "input", "input[1], a function_call, needs"),
        ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools", "tools[1].name must be"),
        (
            {"tools": [{"type": "web_search"}, *[{"type": "function", **F}] * 2]},
            "tools",
            "tools[2] has the name 'f'",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": WRONG}}},
            "text",
            "text.format.schema: ",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text", "text.format.schema must"),
    ],
)
def test_errors_of_responses_name_its_fields(tools_server, fields, param, words):
    body = {"model": "demo", "instructions": "Be brief.", "input": "x"} | fields
    a = httpx.post(tools_server.url + "/v1/responses", json=body, timeout=120)
    e = a.json()["error"]
    assert a.status_code == 400 and e["param"] == param and e["message"].startswith(words), a.text


BASH = {"type": "bash_20250124", "name": "bash"}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "7"}


@pytest.mark.parametrize(
    "fields, words",
    [
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": [RESULT]}]},
            "messages[1] answers the call 't'",
        ),
        ({"tools": [BASH, {"name": "a b", "input_schema": {}}]}, "tools[1].name must be 1 to"),
        (
            {"tools": [BASH, {"name": "f", "strict": True, "input_schema": WRONG}]},
            "tools.f.input_schema: ",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": WRONG}}},
            "output_config.format.schema: ",
        ),
    ],
)
def test_errors_of_messages_name_its_fields(tools_server, fields, words):
    body = {"model": "demo", "max_tokens": 5, "system": "Be brief."}
    body |= {"messages": [{"role": "user", "content": "x"}]} | fields
    a = httpx.post(tools_server.url + "/v1/messages", json=body, timeout=120)
    assert a.status_code == 400 and a.json()["error"]["message"].startswith(words), a.text
