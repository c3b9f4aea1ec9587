"""What constrained calls and answers must not do however the model pulls: calls in tags, and white space without end."""
import json

import pytest

from chat_models import model_with
from conftest import Server
from test_tools import COLOURS, HELLO, TOOLS, Streamed, ask, check_call, post, sdk

# Calls as Qwen3-Coder writes them: a tag a parameter.
TAGS = """{%- if tools %}<system>{% for t in tools %}{{ t | tojson }}{% endfor %}
<tool_call>
<function=name>
<parameter=key>
text
</parameter>
</function>
</tool_call>
{% endif %}
{%- for m in messages %}
    {{- '<' ~ m.role ~ '>' ~ (m.content or '') }}
    {%- for c in m.tool_calls or [] %}{{ '\\n<tool_call>\\n<function=' ~ c.function.name ~ '>\\n' }}
        {%- for key, value in c.function.arguments.items() %}{{ '<parameter=' ~ key ~ '>\\n' ~ value ~ '\\n</parameter>\\n' }}{% endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    s = Server("--served-model-name", "demo", "--kv-cache-memory", "64MiB", "--device", "cpu",
               model=model_with(tmp_path_factory.mktemp("traps") / "demo", TAGS))
    yield s
    s.wait_idle()
    assert s.stop() == 0, s.log


@pytest.mark.parametrize("seed", range(3))
def test_required_calls_in_tags_are_typed_by_the_schema(server, seed):
    fields = dict(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=1, seed=seed)
    choice = ask(sdk(server), **fields).choices[0]
    [call] = choice.message.tool_calls
    check_call(call)
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    s = Streamed(ask(sdk(server), stream=True, **fields))
    assert s.calls[0][0][1:] == [call.function.name, call.function.arguments] and s.finish[0] == "tool_calls"


def test_a_call_in_tags_is_answered(server):
    choice = {"type": "function", "function": {"name": "paint"}}
    first = ask(sdk(server), tools=TOOLS, tool_choice=choice, parallel_tool_calls=False).choices[0].message
    messages = HELLO + [first.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "done"}]
    assert ask(sdk(server), messages, tools=TOOLS, max_tokens=4).choices[0].message.content


def blanks(server):
    """The tokens that are nothing but white space, drawn to wherever they are allowed."""
    ids = set()
    for text in (" ", "\n", "  ", "\t", "    ", "\n\n"):
        made = server.ask("POST", "/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
        ids.update(made)
    return {str(i): 100 for i in ids}


@pytest.mark.parametrize("fields", [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": {
        "type": "object", "properties": {"colour": {"enum": COLOURS}, "n": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["colour", "n"], "additionalProperties": False}}}},
    {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
])
def test_white_space_does_not_go_on_until_max_tokens(server, fields):
    choice = post(server, logit_bias=blanks(server), max_tokens=300, seed=1, **fields).json()["choices"][0]
    assert choice["finish_reason"] in ("stop", "tool_calls"), choice
    if "tools" not in fields:
        assert json.loads(choice["message"]["content"])["colour"] in COLOURS
