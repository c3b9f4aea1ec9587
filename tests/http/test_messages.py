"""/v1/messages with Anthropic's SDK, and with bodies as agents send them: the demo model with the small template of
test_chat. What bodies become and what answers look like is tested in tests/unit/server/test_translate.c and
tests/unit/server/stream/test_dialects.c."""
import json

import httpx
import pytest

from conftest import PATIENCE_S, Server
from test_chat import HELLO, chat, model_with  # noqa: F401  (a fixture)
from test_responses import SAMPLING

BODY = {"model": "demo", "max_tokens": 12, "temperature": 0, "messages": HELLO}


def ask(server, path="/v1/messages", headers=None, **fields):
    return server.ask("POST", path, json={k: v for k, v in (BODY | fields).items() if v is not None}, headers=headers)


def events(answer):
    """The events of a stream; each is named twice, alike."""
    found = []
    for block in answer.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + found[-1]["type"]
    return found


def text_of(message):
    return "".join(b["text"] for b in message["content"])


def test_is_the_answer_of_the_same_chat(chat):
    same = chat.ask("POST", "/v1/chat/completions", json=BODY).json()
    a = ask(chat)
    m = a.json()
    assert a.status_code == 200 and m["id"] == "msg_" + a.headers["request-id"] == "msg_" + a.headers["x-request-id"]
    assert (m["type"], m["role"], m["model"]) == ("message", "assistant", "demo")
    assert m["content"] == [{"type": "text", "text": same["choices"][0]["message"]["content"]}]
    assert m["stop_reason"] == "max_tokens" and m["stop_sequence"] is None
    used = m["usage"]
    assert used["output_tokens"] == 12
    assert used["input_tokens"] + used["cache_read_input_tokens"] == same["usage"]["prompt_tokens"]


def test_events(chat):
    whole = ask(chat).json()
    a = ask(chat, stream=True)
    assert a.headers["content-type"].startswith("text/event-stream")
    e = events(a)
    kinds = [x["type"] for x in e]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    start = e[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["input_tokens"] > 0
    assert all(x["index"] == 0 for x in e[2:-2])
    assert "".join(x["delta"]["text"] for x in e[3:-3]) == text_of(whole)
    assert e[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert e[-2]["usage"]["output_tokens"] == 12


def test_stop_sequences(chat):
    text = text_of(ask(chat).json())
    stop = text[len(text) // 2:][:3]
    m = ask(chat, stop_sequences=["\0never", stop]).json()
    assert text_of(m) == text[:text.index(stop)]
    assert (m["stop_reason"], m["stop_sequence"]) == ("stop_sequence", stop)
    e = events(ask(chat, stop_sequences=[stop], stream=True))
    assert e[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}


@pytest.mark.parametrize("fields", SAMPLING, ids=lambda f: "-".join(f))
def test_fields_of_chats_that_choose_tokens_do_so_here(chat, fields):
    same = chat.ask("POST", "/v1/chat/completions", json=BODY | fields).json()
    a = ask(chat, **fields)
    assert a.status_code == 200 and "X-Quire-Ignored" not in a.headers
    assert text_of(a.json()) == same["choices"][0]["message"]["content"]


def test_system_is_the_first_message(chat):
    messages = [{"role": "system", "content": "Be kind."}] + HELLO
    want = chat.ask("POST", "/v1/chat/completions", json=BODY | {"messages": messages}).json()
    for system in ("Be kind.", [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
                   [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.37; cch=ab12;"},
                    {"type": "text", "text": "Be kind."}]):
        m = ask(chat, system=system).json()
        assert text_of(m) == want["choices"][0]["message"]["content"]
        assert m["usage"]["input_tokens"] + m["usage"]["cache_read_input_tokens"] == want["usage"]["prompt_tokens"]


def test_the_assistants_last_message_is_continued(chat):
    whole = text_of(ask(chat, system=None).json())
    begun = whole[:len(whole) // 2].rstrip()
    m = ask(chat, messages=HELLO + [{"role": "assistant", "content": begun}], max_tokens=4).json()
    assert whole[len(begun):].startswith(text_of(m)[:4])


def test_tokens_are_counted(chat):
    m = ask(chat).json()
    counted = ask(chat, "/v1/messages/count_tokens", max_tokens=None, temperature=None)
    assert counted.status_code == 200
    assert counted.json() == {"input_tokens": m["usage"]["input_tokens"] + m["usage"]["cache_read_input_tokens"]}
    more = ask(chat, "/v1/messages/count_tokens", system="Be kind.").json()
    assert more["input_tokens"] > counted.json()["input_tokens"]
    refused = ask(chat, "/v1/messages/count_tokens", messages=[])
    assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"


def test_more_tokens_than_fit_are_asked_for(chat):
    m = ask(chat, max_tokens=64000, stop_sequences=["."]).json()
    assert m["stop_reason"] == "stop_sequence"


def test_what_agents_send(chat):
    """The fields of a coding agent's request that have no effect here."""
    a = ask(chat, metadata={"user_id": "u"}, thinking={"type": "enabled", "budget_tokens": 31999}, top_k=40, top_p=0.9,
            tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
            service_tier="auto", context_management={"edits": []}, betas=["x"],
            headers={"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "none"})
    assert a.status_code == 200, a.text
    assert a.headers["x-quire-ignored"] == "betas, tools.web_search_20250305"


@pytest.mark.parametrize("fields, words", [
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"messages": None}, "messages is missing"),
    ({"messages": []}, "at least one"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "role 'tool'"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
    ({"temperature": "hot"}, "temperature must be a number"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"tools": [{"name": "read"}]}, "tools[0].input_schema is missing"),
    ({"container": "c"}, "container is not supported"),
    ({"messages": HELLO * 300}, "tokens"),
])
def test_refusals(chat, fields, words):
    a = ask(chat, **fields)
    body = a.json()
    assert a.status_code == 400 and set(body) == {"type", "error"} and body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error" and words in body["error"]["message"]


def test_errors_before_the_body_is_read_have_the_same_form(chat):
    url = chat.url + "/v1/messages"
    a = httpx.post(url, content="x", headers={"Content-Type": "text/plain"}, timeout=PATIENCE_S)
    assert a.status_code == 415 and a.json()["type"] == "error"
    a = httpx.post(url, content="{", headers={"Content-Type": "application/json"}, timeout=PATIENCE_S)
    assert a.status_code == 400 and a.json()["error"]["type"] == "invalid_request_error"
    a = ask(chat, model="claude-opus")
    assert a.status_code == 404 and a.json()["error"]["type"] == "not_found_error"


def test_keys_and_limits(start, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("name=a key=alpha requests_per_minute=2\nname=b key=beta\n")
    s = start("--api-key-file", str(keys), "--device", "cpu", "--served-model-name", "demo",
              model=model_with(tmp_path / "demo", "{% for m in messages %}{{ m.content }}{% endfor %}"))
    none = ask(s)
    assert none.status_code == 401 and none.json()["error"]["type"] == "authentication_error"
    assert ask(s, headers={"x-api-key": "wrong"}).status_code == 401
    assert ask(s, headers={"x-api-key": ""}).status_code == 401
    assert ask(s, headers={"x-api-key": "beta"}).status_code == 200
    assert ask(s, headers={"Authorization": "Bearer beta"}).status_code == 200
    assert ask(s, headers={"Authorization": "Bearer wrong", "x-api-key": "beta"}).status_code == 200
    assert s.ask("GET", "/v1/models", headers={"x-api-key": "beta"}).status_code == 200
    counted = [ask(s, "/v1/messages/count_tokens", headers={"x-api-key": "alpha"}) for _ in range(3)]
    assert [a.status_code for a in counted] == [200, 200, 429]
    assert counted[2].json()["error"]["type"] == "rate_limit_error" and "retry-after" in counted[2].headers


def test_metrics_and_log(chat):
    # A request is logged and counted when its answer has been sent, after which its client may act.
    chat.wait_idle()
    before = chat.metric("http_requests_total", route="/v1/messages", status="200")
    a = ask(chat)
    chat.wait_metric("http_requests_total", before + 1, route="/v1/messages", status="200")
    assert f"id={a.headers['x-request-id']} method=POST route=/v1/messages" in chat.log


def test_a_client_that_leaves_frees_its_blocks(chat):
    with httpx.stream("POST", chat.url + "/v1/messages", json=BODY | {"max_tokens": 900, "stream": True},
                      timeout=PATIENCE_S) as a:
        next(a.iter_text())
    chat.wait_idle()


@pytest.fixture(scope="module")
def client(chat):
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
    return anthropic.Anthropic(base_url=chat.url, api_key="none", max_retries=0)


def test_sdk(client):
    import anthropic
    fields = dict(model="demo", max_tokens=12, messages=HELLO, extra_body={"temperature": 0})
    whole = client.messages.create(**fields)
    assert whole.content[0].type == "text" and whole.stop_reason == "max_tokens"
    with client.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens == 12
    n = client.messages.count_tokens(model="demo", messages=HELLO).input_tokens
    assert n == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert [m.id for m in client.models.list()] == ["demo"]
    with pytest.raises(anthropic.NotFoundError) as e:
        client.messages.create(**fields | {"model": "other"})
    assert e.value.request_id and e.value.body["error"]["type"] == "not_found_error"
