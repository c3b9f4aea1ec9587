"""Chat completions with the OpenAI SDK: the demo model with a small template of its own."""
import json
import urllib.error
import urllib.request

import openai
import pytest

from chat_models import model_with
from conftest import Server

TEMPLATE = """{%- for m in messages %}
    {%- if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no role ' ~ m.role) }}{% endif %}
    {{- '<' ~ m.role ~ '>' ~ m.content | trim ~ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<' ~ who | default('assistant') ~ '>' }}{% endif %}"""
HELLO = [{"role": "user", "content": "Once upon a time there was a little dog."}]


@pytest.fixture(scope="module")
def chat(isa, tmp_path_factory):
    s = Server("--served-model-name", "demo", "--kv-cache-memory", "64MiB", "--device", "cpu",
               model=model_with(tmp_path_factory.mktemp("chat") / "demo", TEMPLATE))
    yield s
    s.wait_idle()
    assert s.stop() == 0, s.log


@pytest.fixture(scope="module")
def client(chat):
    return openai.OpenAI(base_url=chat.url + "/v1", api_key="none", max_retries=0)


def post(server, body):
    request = urllib.request.Request(server.url + "/v1/chat/completions", json.dumps(body).replace("Infinity", "1e999").encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as e:
        return e.code, json.load(e)["error"]


def greedy(client, messages=HELLO, **fields):
    return client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=12, **fields)


def test_answer(client):
    a = greedy(client)
    assert a.object == "chat.completion" and a.id.startswith("chatcmpl-")
    m = a.choices[0].message
    assert m.role == "assistant" and m.content and a.choices[0].finish_reason == "length"
    assert a.usage.completion_tokens == 12


def test_is_the_completion_of_the_rendered_text(client):
    text = "<system>Be kind.\n<user>" + HELLO[0]["content"] + "\n<assistant>"
    completion = client.completions.create(model="demo", prompt=text, temperature=0, max_tokens=12, extra_body={"add_special_tokens": False})
    a = greedy(client, [{"role": "developer", "content": " Be kind. "}] + HELLO)
    assert a.choices[0].message.content == completion.choices[0].text
    assert a.usage.prompt_tokens == completion.usage.prompt_tokens


def test_stream(client):
    want = greedy(client).choices[0].message.content
    events = list(greedy(client, stream=True, stream_options={"include_usage": True}))
    assert {e.object for e in events} == {"chat.completion.chunk"}
    assert events[0].choices[0].delta.role == "assistant"
    assert all(e.choices[0].delta.role is None for e in events[1:-1])
    assert "".join(e.choices[0].delta.content or "" for e in events[:-1]) == want
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-1].choices == [] and events[-1].usage.completion_tokens == 12


def test_stream_of_several(client):
    texts, roles = ["", ""], [0, 0]
    for e in client.chat.completions.create(model="demo", messages=HELLO, n=2, seed=3, max_tokens=8, stream=True):
        c = e.choices[0]
        texts[c.index] += c.delta.content or ""
        roles[c.index] += c.delta.role is not None
    a = client.chat.completions.create(model="demo", messages=HELLO, n=2, seed=3, max_tokens=8)
    assert [c.message.content for c in a.choices] == texts and roles == [1, 1]


def test_logprobs(client):
    a = greedy(client, logprobs=True, top_logprobs=2)
    content = a.choices[0].logprobs.content
    assert len(content) == 12 and all(len(t.top_logprobs) == 2 for t in content)
    assert b"".join(bytes(t.bytes) for t in content).decode() == a.choices[0].message.content
    assert all(t.logprob == t.top_logprobs[0].logprob for t in content)
    streamed = [t for e in greedy(client, logprobs=True, stream=True) if e.choices[0].logprobs for t in e.choices[0].logprobs.content]
    assert [t.token for t in streamed] == [t.token for t in content]


def test_stop_and_lengths(client):
    text = greedy(client).choices[0].message.content
    stop = text[len(text) // 2:][:3]
    a = greedy(client, stop=[stop])
    assert a.choices[0].finish_reason == "stop" and a.choices[0].message.content == text[:text.index(stop)]
    a = client.chat.completions.create(model="demo", messages=HELLO, temperature=0, max_completion_tokens=3)
    assert a.usage.completion_tokens == 3
    a = client.chat.completions.create(model="demo", messages=HELLO, temperature=0, extra_body={"ignore_eos": True})
    assert a.usage.total_tokens == 1024 and a.choices[0].finish_reason == "length"


def test_parts_are_joined(client):
    parts = [{"type": "text", "text": "Once upon a time"}, {"type": "text", "text": "there was a dog."}]
    one = greedy(client, [{"role": "user", "content": "Once upon a time\nthere was a dog."}])
    assert greedy(client, [{"role": "user", "content": parts}]).choices[0].message.content == one.choices[0].message.content


def test_continue_final_message(client):
    messages = HELLO + [{"role": "assistant", "content": "The dog was"}]
    a = greedy(client, messages, extra_body={"continue_final_message": True})
    text = "<user>" + HELLO[0]["content"] + "\n<assistant>The dog was"
    completion = client.completions.create(model="demo", prompt=text, temperature=0, max_tokens=12, extra_body={"add_special_tokens": False})
    assert a.choices[0].message.content == completion.choices[0].text


def test_nul_is_a_character(client):
    def messages(text):
        return [{"role": "user", "content": text, "name": "a\0"}, {"role": "assistant", "content": [{"type": "text", "text": text + "!"}]}]

    text = "once\0upon"
    rendered = f"<user>{text}\n<assistant>{text}!"
    completion = client.completions.create(model="demo", prompt=rendered, temperature=0, max_tokens=12, extra_body={"add_special_tokens": False})
    a = greedy(client, messages(text), extra_body={"continue_final_message": True})
    assert a.choices[0].message.content == completion.choices[0].text
    assert a.usage.prompt_tokens == completion.usage.prompt_tokens


def test_template_kwargs(client):
    plain, other = (greedy(client, extra_body=b).usage.prompt_tokens for b in ({}, {"chat_template_kwargs": {"who": "a very long name of someone"}}))
    assert other > plain


@pytest.mark.parametrize("fields, param, part", [
    ({"messages": None}, "messages", "missing"),
    ({"messages": []}, "messages", "1 to 4096"),
    ({"messages": "hi"}, "messages", "must be a list"),
    ({"messages": [1]}, "messages", "messages[0] must be an object"),
    ({"messages": [{"content": "x"}]}, "messages", "needs a role"),
    ({"messages": [{"role": "cat", "content": "x"}]}, "messages", "'cat'"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "tool_call_id"),
    ({"messages": [{"role": "user"}]}, "messages", "content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages", "'image_url'"),
    ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages", "name"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages", "tool calls"),
    ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages", "1024"),
    ({"tools": [{"type": "function"}]}, "tools", "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "no place for tools"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"response_format": {"type": "xml"}}, "response_format", "'xml'"),
    ({"logprobs": 3}, "logprobs", "true or false"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs: true"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "between 1"),
    ({"max_tokens": 5000}, "max_tokens", "1024"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "field of its own"),
    ({"chat_template_kwargs": {"a": [1, {"b": 2**63}]}}, "chat_template_kwargs", "9223372036854775808"),
    ({"chat_template_kwargs": {"a": float("inf")}}, "chat_template_kwargs", "1e999"),
    ({"messages": [{"role": "user\0", "content": "x"}]}, "messages", "the character NUL"),
    ({"chat_template": "x"}, "chat_template", "templates of clients"),
    ({"temperature": 3}, "temperature", "at most 2"),
])
def test_refusals(chat, fields, param, part):
    status, error = post(chat, {"messages": HELLO, **fields})
    assert status == 400 and error["param"] == param and part in error["message"], error


def test_fields_of_completions_are_not_chats(chat):
    request = urllib.request.Request(chat.url + "/v1/chat/completions", json.dumps({"messages": HELLO, "max_tokens": 1, "echo": True, "suffix": "x"}).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["X-Quire-Ignored"] == "echo, suffix"


@pytest.mark.parametrize("flags, blocks", [((), 16), (("--preemption", "swap", "--swap-space", "1GiB"), 16)])
def test_a_pool_that_holds_the_model_once(start, tmp_path, flags, blocks):
    """The default of max_tokens is lowered to what the pool can hold, for any number of sequences."""
    s = start("--device", "cpu", "--kv-blocks", str(blocks), "--max-model-len", str(blocks * 16), *flags,
              model=model_with(tmp_path / "demo", TEMPLATE))
    for fields in (dict(n=2), dict(n=1), dict(n=1, best_of=3), dict(n=2, use_beam_search=True, beam_width=4)):
        status, a = post(s, {"messages": HELLO, "ignore_eos": True, "temperature": 0 if "beam_width" in fields else 1, **fields})
        assert status == 200, a
        prompt, width = a["usage"]["prompt_tokens"], max(fields.values())
        shared = (prompt - 1) // 16
        most = ((blocks - shared) // width + shared) * 16 + 1 - prompt if width > 1 else blocks * 16 - prompt
        assert a["usage"]["completion_tokens"] == most * fields.get("best_of", fields["n"])
        assert all(c["finish_reason"] == "length" for c in a["choices"])
    status, error = post(s, {"messages": HELLO, "max_tokens": 200, "n": 2})
    assert status == 400 and error["param"] == "max_tokens"


def test_prompts_are_logged_as_the_model_gets_them(start, tmp_path):
    def lines(server, event):
        return [line for line in map(json.loads, server.log.splitlines()) if line["event"] == event]

    s = start("--device", "cpu", "--kv-cache-memory", "64MiB", "--log-prompts", "--log-format", "json",
              model=model_with(tmp_path / "demo", TEMPLATE))
    status, a = post(s, {"messages": [{"role": "user", "content": 'say\n"hé"'}], "max_tokens": 1})
    assert status == 200
    [line] = lines(s, "prompt")
    assert line["text"].lstrip() == '<user>say\n"hé"\n<assistant>' and line["tokens"] == a["usage"]["prompt_tokens"]
    assert "chatcmpl-" + line["id"] == a["id"]
    assert s.ask("POST", "/v1/completions", json=dict(prompt=["one", "two\0", "long " * 900], max_tokens=1)).status_code == 200
    found = lines(s, "prompt")[1:]
    assert [line["index"] for line in found] == [0, 1, 2] and "one" in found[0]["text"] and found[1]["text"].endswith("two\0")
    assert 2000 < len(found[2]["text"]) < 4000 and found[2]["tokens"] > 900
    assert s.ask("POST", "/v1/completions", json=dict(prompt=["x"] * 20, max_tokens=1)).status_code == 200
    assert len(lines(s, "prompt")) == 20 and lines(s, "more prompts")[0]["prompts"] == 4
    assert all(len(line) < 4096 for line in s.log.splitlines())


def test_prompts_are_not_logged_unasked(start):
    s = start("--log-level", "debug")
    assert s.ask("POST", "/v1/completions", json=dict(prompt="a secret", max_tokens=1)).status_code == 200
    assert "secret" not in s.log


def test_a_template_that_cannot_be_used_is_told_at_start(start, tmp_path):
    s = start("--device", "cpu", "--kv-cache-memory", "64MiB", model=model_with(tmp_path / "demo", "{% include 'x' %}"))
    assert "no chat" in s.log and "the statement 'include'" in s.log
    status, error = post(s, {"messages": HELLO})
    assert status == 400 and "the statement 'include'" in error["message"]
    assert s.stop() == 0
