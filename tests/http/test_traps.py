"""What constrained calls and answers must not do however the model pulls: calls in tags, and white space without end."""
import json
import os

import pytest

from chat_models import REASONING, model_with
from conftest import Server, serving
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


# ---- the step that ends the reasoning ----


def with_end_of_reasoning(directory):
    """The demo model, whose word " was" is the mark that ends its reasoning: a token of its own, so that drafts go
    beyond it. Returns the directory and its id."""
    model_with(directory, REASONING)
    path = os.path.join(directory, "tokenizer.json")
    with open(path) as f:
        tokenizer = json.load(f)
    vocabulary, word = tokenizer["model"]["vocab"], "Ġwas"
    id = vocabulary.pop(word)
    vocabulary["</think>"] = id
    tokenizer["model"]["merges"] = [m for m in tokenizer["model"]["merges"]
                                    if word not in (pair := m.split(" ") if isinstance(m, str) else m) and "".join(pair) != word]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer["added_tokens"].append({"id": id, "content": "</think>", **flags})
    with open(path, "w") as f:
        json.dump(tokenizer, f)
    return str(directory), id


@pytest.mark.parametrize("drawn_to_end, fields", [
    (4, {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": {
        "type": "object", "properties": {"colour": {"enum": COLOURS}}, "required": ["colour"], "additionalProperties": False}}}}),
    (2, {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}),
])
def test_drafts_behind_the_reasoning_do_not_escape_the_grammar(tmp_path, drawn_to_end, fields):
    """The drafts of one step are the end of the reasoning and what a free text would go on with."""
    model, end = with_end_of_reasoning(tmp_path / "demo")
    body = dict(max_tokens=120, logit_bias={str(end): drawn_to_end}, **fields)
    common = ("--served-model-name", "demo", "--kv-cache-memory", "64MiB", "--device", "cpu")
    drafting = ("--speculate", "draft", "--draft-model", model, "--max-draft", "6")
    answers = []
    for flags in ((), drafting):
        with serving(*common, *flags, model=model, env={"QUIRE_STEP_COSTS": "unknown"}) as s:
            found = []
            for seed in range(4):
                choice = post(s, temperature=0.7 * (seed > 0), seed=seed, **body).json()["choices"][0]
                found.append((choice["message"].get("reasoning", ""), choice["message"]["content"],
                              [c["function"] for c in choice["message"].get("tool_calls") or []], choice["finish_reason"]))
            answers.append(found)
            if flags:
                assert s.metric("spec_decode_num_accepted_tokens_total") > 0
    assert answers[0] == answers[1]
    ended = [a for a in answers[0] if a[3] != "length"]
    assert len(ended) >= 2 and any(a[0] for a in ended), answers[0]
    for reasoning, content, calls, reason in ended:
        assert "</think>" not in reasoning
        if "tools" in fields:
            assert reason == "tool_calls" and len(calls) == 1 and json.loads(calls[0]["arguments"]) is not None
        else:
            assert reason == "stop" and json.loads(content)["colour"] in COLOURS
