"""Chats as bodies of /v1/responses and /v1/messages, for tests/http/combinations.py: the same request
over another API must give the same text, calls and end. Also what holds of the answers of both routes,
in one body and in events."""

import json

from combo_draw import CUT, Case

# Fields of a chat that an API has under some name, or that say nothing about the text.
SAMPLING = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed",
            "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "bad_words", "allowed_token_ids", "min_tokens",
            "skip_special_tokens", "spaces_between_special_tokens", "priority", "cache_salt", "request_id")
CONSTRAINTS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object")
PLAIN = {
    *SAMPLING, *CONSTRAINTS,
    "messages", "model", "max_tokens", "max_completion_tokens", "temperature",
    "stream", "stream_options", "return_token_ids", "logprobs", "top_logprobs", "user",
    "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "service_tier", "store", "stop", "tools", "tool_choice", "parallel_tool_calls", "response_format",
}
ROUTES = RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


# ---- the request ----


def copied(body, *names):
    return {n: body[n] for n in names if body.get(n) is not None}


def choice_named(body, how):
    """tool_choice; `how` makes it of a function's name."""
    choice = body.get("tool_choice")
    return how(choice["function"]["name"]) if isinstance(choice, dict) else choice


def as_responses(body, most):
    new = copied(body, *SAMPLING, *CONSTRAINTS, "model", "temperature", "stop", "stream", "parallel_tool_calls", "metadata",
                 "user")
    new |= {"max_output_tokens": most, "input": [
        {"role": m["role"], "content": m["content"] if isinstance(m["content"], str) else
         [{"type": "input_text", "text": p["text"]} for p in m["content"]]} for m in body["messages"]]}
    if body.get("tools"):
        new["tools"] = [{"type": "function", "strict": False} | t["function"] for t in body["tools"]]
        choice = choice_named(body, lambda name: {"type": "function", "name": name})
        new |= {"tool_choice": choice} if choice else {}
    wanted = body.get("response_format") or {}
    if wanted:
        new["text"] = {"format": {k: v for k, v in wanted.items() if k != "json_schema"} | wanted.get("json_schema", {})}
    return new


def as_messages(body, most):
    new = copied(body, *SAMPLING, *CONSTRAINTS, "model", "temperature", "stream")
    new |= {"max_tokens": most, "messages": body["messages"]}
    stop = body.get("stop")
    if stop:
        new["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    if body.get("tools"):
        new["tools"] = [{"name": t["function"]["name"], "input_schema": t["function"].get("parameters", {"type": "object"})}
                        for t in body["tools"]]
        names = {None: {"type": "auto"}, "auto": {"type": "auto"}, "required": {"type": "any"}, "none": {"type": "none"}}
        choice = choice_named(body, lambda name: {"type": "tool", "name": name})
        choice = choice if isinstance(choice, dict) else dict(names[choice])
        if body.get("parallel_tool_calls") is False and choice["type"] != "none":
            choice["disable_parallel_tool_use"] = True
        new["tool_choice"] = choice
    wanted = body.get("response_format") or {}
    if wanted.get("type") == "json_schema":
        new["output_config"] = {"format": {"type": "json_schema", "schema": wanted["json_schema"]["schema"]}}
    return new


def same_meaning(case, route):
    """Whether the other API can say all that the chat does."""
    body = {k: v for k, v in case.body.items() if v is not None}
    if route == MESSAGES:
        tools = [t["function"] for t in body.get("tools") or []]
        if any(t.get("strict") or "parameters" not in t for t in tools):
            return False
        if (body.get("response_format") or {}).get("type") in ("json_object", "structural_tag"):
            return False
    return body.keys() <= PLAIN


def over(case, route):
    """The chat as a case of the other route, where nothing cuts a prompt; None: it cannot be one."""
    body = case.body
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    if case.route != "/v1/chat/completions" or case.spoiled or case.rough or body.get(CUT) or not most:
        return None
    made = (as_responses if route == RESPONSES else as_messages)(body, most)
    return Case(route, made, padding=case.padding)


# ---- the answer ----


def call_of(name, arguments):
    return [name, arguments if isinstance(arguments, str) else json.dumps(arguments, separators=(",", ":"))]


def read_response(r, need):
    """A response object as one choice."""
    failed = r["status"] == "failed"  # as a chat's choice whose finish_reason is "error"
    known = failed and r["error"]["code"] == "invalid_prompt" or r["status"] in ("completed", "incomplete")
    need(r["object"] == "response" and known, "a response's status", lambda: json.dumps(r)[:300])
    text, calls = "", []
    for item in r["output"]:
        if item["type"] == "message":
            need(item["role"] == "assistant", "a message without its role")
            text += "".join(p["text"] for p in item["content"])
        elif item["type"] == "function_call":
            calls.append(call_of(item["name"], item["arguments"]))
    cut = r["status"] == "incomplete"
    need(not cut or r["incomplete_details"]["reason"] == "max_output_tokens", "why a response is incomplete", lambda: json.dumps(r)[:300])
    use = r["usage"]
    need(use["total_tokens"] == use["input_tokens"] + use["output_tokens"], "usage does not add up", lambda: str(use))
    return {"text": text, "calls": calls, "finish_reason": "error" if failed else "length" if cut else "tool_calls" if calls else "stop"}


STOPS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


def read_message(m, need):
    """An Anthropic message as one choice."""
    need(m["type"] == "message" and m["role"] == "assistant", "a message without its type or role")
    need(m["stop_reason"] in STOPS, "stop_reason", lambda: str(m["stop_reason"]))
    calls = [call_of(b["name"], b["input"]) for b in m["content"] if b["type"] == "tool_use"]
    text = "".join(b["text"] for b in m["content"] if b["type"] == "text")
    return {"text": text, "calls": calls, "finish_reason": STOPS[m["stop_reason"]]}


def events_of(body, need):
    for event in body.removesuffix(b"data: [DONE]\n\n").split(b"\n\n"):
        if not event or event.startswith(b":"):
            continue
        lines = event.split(b"\n")
        need(len(lines) == 2 and lines[0].startswith(b"event: ") and lines[1].startswith(b"data: "), "not an event", lambda: repr(event[:200]))
        data = json.loads(lines[1][6:])
        need(data["type"] == lines[0][7:].decode(), "an event of two names", lambda: repr(event[:200]))
        yield data


def read_response_events(body, need):
    text, open_items, last = "", set(), None
    need(body.endswith(b"data: [DONE]\n\n"), "a stream without [DONE]", lambda: repr(body[-200:]))
    for n, e in enumerate(events_of(body, need)):
        need(last is None, "an event behind the last", lambda: str(e)[:200])
        need(e["sequence_number"] == n, "events out of order", lambda: str(e)[:200])
        kind = e["type"]
        if kind == "response.output_item.added":
            open_items.add(e["output_index"])
        elif kind == "response.output_item.done":
            need(e["output_index"] in open_items, "an item ends that did not begin")
            open_items.discard(e["output_index"])
        elif kind == "response.output_text.delta":
            text += e["delta"]
        elif kind in ("response.completed", "response.incomplete", "response.failed"):
            last = e["response"]
    need(last is not None and not open_items, "a stream without its end", lambda: repr(body[-300:]))
    choice = read_response(last, need)
    need(choice["text"] == text, "events and the response differ", lambda: f"{text!r} {choice['text']!r}")
    return choice


def read_message_events(body, need):
    whole, ended = None, False
    for e in events_of(body, need):
        need(not ended, "an event behind the last", lambda: str(e)[:200])
        kind = e["type"]
        if kind == "message_start":
            whole = e["message"]
        elif kind == "content_block_start":
            need(e["index"] == len(whole["content"]), "blocks out of order", lambda: str(e))
            whole["content"].append(dict(e["content_block"]))
        elif kind == "content_block_delta":
            block, delta = whole["content"][e["index"]], e["delta"]
            for name, value in delta.items():
                if name != "type":
                    block[name] = block.get(name, "") + value
        elif kind == "content_block_stop" and "partial_json" in whole["content"][e["index"]]:
            block = whole["content"][e["index"]]
            try:
                block["input"] = json.loads(block["partial_json"] or "{}")
            except ValueError:  # cut by the length
                block["input"] = block["partial_json"]
        elif kind == "message_delta":
            whole |= {k: v for k, v in e["delta"].items()}
        ended = kind == "message_stop"
    need(whole is not None and ended, "a stream without its end", lambda: repr(body[-300:]))
    return read_message(whole, need)


def read_answer(route, body, streamed, need):
    """The one choice of a 200."""
    if streamed:
        return (read_response_events if route == RESPONSES else read_message_events)(body, need)
    return (read_response if route == RESPONSES else read_message)(json.loads(body), need)


def comparable(choice):
    """What must be the same over each API: of calls that were cut only the names."""
    whole = choice["finish_reason"] != "length"
    calls = [[name, json.loads(a) if whole else None] for name, a in choice.get("calls") or []]
    return [choice["text"], calls, choice["finish_reason"]]
