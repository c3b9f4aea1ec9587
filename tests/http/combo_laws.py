"""The laws of tests/http/combinations.py: what holds for the answer to every request.

An answer is turned into an Outcome, which is the same for a stream and for one body.
`check` raises Broken if a law does not hold, `compare` if two outcomes that must be equal
differ.
"""

import codecs
import json
import re

import combo_agents
from combo_draw import (
    CHOICES,
    EXPRESSION,
    GENERATING,
    TAG_BEGIN,
    TAG_END,
    calls_wanted,
    constraint_of,
    is_beam,
    is_constrained,
    n_of,
)

FINISHES = {"stop", "length", "error", "tool_calls", "function_call"}


class Broken(Exception):
    """A law that does not hold. `kind` is short and the same for similar failures."""

    def __init__(self, kind, detail):
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


def need(condition, kind, detail=""):
    if not condition:
        raise Broken(kind, detail() if callable(detail) else detail)


class Outcome:
    """One answer: `choices` by index, each a dict; `usage` or None; `error`, the
    refusal's object, or None."""

    def __init__(self, status):
        self.status, self.choices, self.usage, self.error, self.body = status, {}, None, None, None

    def copy(self):
        twin = Outcome(self.status)
        twin.choices, twin.error, twin.body = self.choices, self.error, self.body
        return twin


# ---- from bytes to an Outcome ----


def refuse_constant(name):
    raise ValueError(f"{name} is no JSON")


def load(data, what):
    try:
        return json.loads(data, parse_constant=refuse_constant)
    except ValueError as e:
        raise Broken("not JSON", f"{what}: {e}: {bytes(data)[:300]!r}") from e


def extend(have, piece):
    """Appends the lists of a chunk's logprobs to those of earlier chunks."""
    for name, value in piece.items():
        if isinstance(value, list):
            have.setdefault(name, []).extend(value)


def add_calls(choice, delta):
    """The calls of a chunk, or of a whole message, as [name, arguments]."""
    function = delta.get("function_call")
    for i, call in enumerate(delta.get("tool_calls") or ([{"function": function}] if function else [])):
        have = choice.setdefault("calls", [])
        index, name = call.get("index", 0 if function else i), call["function"].get("name")
        need(
            index == (len(have) if name is not None else len(have) - 1),
            "calls out of order",
            lambda: json.dumps(delta),
        )
        if name is not None:
            need(function or call.get("id"), "a call without an id", lambda: json.dumps(delta))
            have.append([name, ""])
        have[index][1] += call["function"]["arguments"]


def add_piece(outcome, chunk, piece, chat):
    """One choice of one chunk."""
    new = {"text": "", "finish_reason": None, "token_ids": None, "logprobs": None, "seen": 0}
    choice = outcome.choices.setdefault(piece["index"], new)
    need(
        choice["finish_reason"] is None, "a chunk after its choice's end", lambda: json.dumps(chunk)
    )
    choice["seen"] += 1
    if chat:
        need(
            choice["seen"] > 1 or piece["delta"].get("role") == "assistant",
            "a first chunk without a role",
        )
        choice["text"] += piece["delta"].get("content") or ""
        add_calls(choice, piece["delta"])
    else:
        choice["text"] += piece["text"]
    if piece.get("logprobs"):
        choice["logprobs"] = choice["logprobs"] or {}
        extend(choice["logprobs"], piece["logprobs"])
    if piece.get("token_ids") is not None:
        choice["token_ids"] = (choice["token_ids"] or []) + piece["token_ids"]
    for name in ("prompt_token_ids", "prompt_logprobs", "error", "stop_reason"):
        if name in piece:
            choice[name] = piece[name]
    choice["finish_reason"] = piece["finish_reason"]


def read_chunk(outcome, chunk, chat, usage_wanted):
    """The JSON of one event."""
    if "error" in chunk and "choices" not in chunk:
        outcome.error = chunk["error"]
        return
    if not chunk["choices"]:
        need(
            usage_wanted and outcome.usage is None,
            "a usage chunk that was not asked for, or a second one",
        )
        outcome.usage = chunk["usage"]
        return
    need(outcome.usage is None, "a choice after the usage chunk")
    for piece in chunk["choices"]:
        add_piece(outcome, chunk, piece, chat)


def read_stream(outcome, body, case):
    """An Outcome from server-sent events; checks the laws of streams."""
    chat = case.route == "/v1/chat/completions"
    options = case.body.get("stream_options") or {}
    need(body.endswith(b"data: [DONE]\n\n"), "a stream without [DONE]", lambda: repr(body[-200:]))
    ids, counted = set(), 0
    for event in body[: -len(b"data: [DONE]\n\n")].split(b"\n\n"):
        if not event or event.startswith(b":"):
            continue
        need(
            event.startswith(b"data: ") and b"\n" not in event,
            "not an event",
            lambda: repr(event[:200]),
        )
        chunk = load(event[6:], "a chunk")
        ids.add(chunk.get("id", next(iter(ids), None)))
        if options.get("continuous_usage_stats") and "usage" in chunk:
            need(chunk["usage"]["completion_tokens"] >= counted, "usage that falls")
            counted = chunk["usage"]["completion_tokens"]
        read_chunk(outcome, chunk, chat, options.get("include_usage"))
    need(len(ids) <= 1, "chunks with several ids", lambda: str(ids))
    need(
        bool(outcome.usage) == bool(options.get("include_usage")) or outcome.error, "no usage chunk"
    )


def read_body(outcome, body, case):
    outcome.body = data = load(body, "the body")
    if case.route not in GENERATING:
        return
    for choice in data["choices"]:
        if "message" in choice:
            need(choice["message"]["role"] == "assistant", "a message without its role")
            choice["text"] = choice["message"]["content"] or ""
            add_calls(choice, choice["message"])
        need(choice["index"] not in outcome.choices, "an index twice")
        outcome.choices[choice["index"]] = choice
    need(
        [c["index"] for c in data["choices"]] == list(range(len(data["choices"]))),
        "choices out of order",
    )
    outcome.usage = data["usage"]


def read_error(outcome, body):
    data = load(body, "an error")
    need(
        set(data) == {"error"} and set(data["error"]) == {"message", "type", "param", "code"},
        "an error of another shape",
        lambda: repr(data),
    )
    outcome.error = data["error"]
    need(
        outcome.error["code"] == outcome.status and outcome.error["message"],
        "an error without code or message",
        lambda: repr(data),
    )


# ---- refusals ----


def is_json(text):
    try:
        json.loads(text, parse_constant=refuse_constant)
        return True
    except ValueError:
        return False


def check_status(case, answer, outcome):
    """The refusals that are possible."""
    need(not answer.late, "hang", "no whole answer within the bound")
    need(not answer.cut, "connection cut", lambda: answer.body.decode())
    need(
        answer.status < 500 or answer.status == 503,
        str(answer.status),
        lambda: answer.body[:400].decode(),
    )
    need(answer.headers.get("x-request-id"), "no X-Request-Id")
    if answer.status in (429, 503):
        need(
            answer.headers.get("retry-after"), "no Retry-After", lambda: answer.body[:300].decode()
        )
    if answer.status == 200:
        need(
            not case.spoiled, "accepted", lambda: f"{case.spoiled} is not what /openapi.json allows"
        )
        return
    need(
        not case.clean or answer.status in (429, 503), "refused", lambda: answer.body[:400].decode()
    )
    if answer.status == 400:
        param = outcome.error["param"]
        if not is_json(case.text()):
            return
        need(param, "a 400 that names no field", lambda: outcome.error["message"])
        need(
            not case.spoiled or case.rough or param == case.spoiled,
            "a 400 that names another field",
            lambda: f"{param}, not {case.spoiled}: {outcome.error['message']}",
        )


# ---- one choice ----


class Text:
    """A choice's text according to its token ids: bytes, special tokens, stop strings,
    the offset of each token's text."""

    def __init__(self, facts, body, ends_itself=False):
        self.ends_itself = ends_itself  # a stop has no token of its own
        self.facts, self.skip = facts, body.get("skip_special_tokens") is not False
        stop = body.get("stop") or []
        self.stops = [stop] if isinstance(stop, str) else stop
        self.keep = body.get("include_stop_str_in_output") is True
        self.least = body.get("min_tokens") or 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token, final=False):
        if (
            token < 0
            or token >= len(self.facts.bytes)
            or (self.skip and token in self.facts.special)
        ):
            return self.decoder.decode(b"", final)
        return self.decoder.decode(self.facts.bytes[token], final)

    def match(self, text, before):
        """(end of the first stop string that ends after `before`, that string)."""
        ends = [
            (at + len(s), -len(s), s)
            for s in self.stops
            for at in [text.find(s, max(0, before - len(s) + 1))]
            if at >= 0
        ]
        return min(ends, default=None)

    def generated(self, tokens, finish, stop_reason):
        """(text, stop string or None) of generated tokens; with echo the prompt's tokens
        were pushed before."""
        text = ""
        for i, token in enumerate(tokens):
            last = i == len(tokens) - 1
            by_token = last and finish == "stop" and not isinstance(stop_reason, str)
            by_token = by_token and not self.ends_itself
            before = len(text)
            if not by_token or self.keep:
                text += self.push(token)
            if last:
                text += self.decoder.decode(b"", True)
            found = self.match(text, before) if i >= self.least and not by_token else None
            if found:
                return text[: found[0] + (0 if self.keep else found[1])], found[2]
        return text + ("" if tokens else self.decoder.decode(b"", True)), None


def check_text(case, facts, choice):
    """The text must match the token ids, if both are present."""
    tokens, prompt = choice.get("token_ids"), choice.get("prompt_token_ids")
    if (
        calls_wanted(case.body)  # the text is without calls and their marks
        or tokens is None
        or prompt is None
        or facts.bytes is None
        or choice["finish_reason"] == "error"
    ):
        return
    # A grammar that is complete ends the text behind its last token.
    by_grammar = is_constrained(case.body) and choice.get("stop_reason") is None
    ends_itself = by_grammar and choice["finish_reason"] == "stop" and tokens
    model, head = Text(facts, case.body, ends_itself and tokens[-1] not in facts.eos), ""
    if case.body.get("echo"):
        head = "".join(model.push(t) for t in prompt)
    want, stop = model.generated(tokens, choice["finish_reason"], choice.get("stop_reason"))
    need(
        choice["text"] == head + want,
        "text is not what its token ids say",
        lambda: f"{choice['text']!r}, token ids say {head + want!r}",
    )
    reason = choice.get("stop_reason")
    need(
        (reason if isinstance(reason, str) else None) == stop,
        "stop_reason is not what the text says",
        lambda: f"{reason!r}, the text says {stop!r}",
    )


def is_small(text):
    """Whether the text is valid by SMALL_SCHEMA."""
    value = json.loads(text)
    return (
        isinstance(value, dict)
        and set(value) in ({"a"}, {"a", "b"})
        and value["a"] in ("x", 1, None)
        and value["a"] is not True
        and isinstance(value.get("b", True), bool)
    )


def tags_are_small(text):
    """Whether what stands in each tag is valid by SMALL_SCHEMA, and each tag ends."""
    for part in text.split(TAG_BEGIN)[1:]:
        value, end, _ = part.partition(TAG_END)
        if not end or not is_small(value):
            return False
    return True


def obeys(name, value, text):
    """Whether a text that its grammar ended is what the field asks for."""
    if name == "structured_outputs":
        [(name, value)] = value.items()
    kind = value["type"] if name == "response_format" else name.removeprefix("guided_")
    try:
        return {
            "json": is_small,
            "json_schema": is_small,
            "json_object": lambda t: isinstance(json.loads(t), dict),
            "regex": lambda t: re.fullmatch(EXPRESSION, t),
            "grammar": lambda t: re.fullmatch(EXPRESSION, t),
            "choice": lambda t: t in CHOICES,
            "structural_tag": tags_are_small,
        }[kind](text)
    except ValueError:
        return False


def check_constraint(case, choice):
    """A constrained answer that ended by itself is valid, and so is every call."""
    body, name = case.body, constraint_of(case.body)
    whole = choice["finish_reason"] == "stop" and choice.get("stop_reason") is None
    if name and whole and not calls_wanted(body) and not case.rough and not body.get("echo"):
        need(
            obeys(name, body[name], choice["text"]),
            "an answer that its grammar does not allow",
            lambda: f"{name}: {choice['text']!r}",
        )
    if choice["finish_reason"] in ("tool_calls", "function_call"):
        need(choice.get("calls"), "no calls", lambda: str(choice))
        for called, arguments in choice["calls"]:
            strict = called == "g" or body.get("tool_choice") not in (None, "auto")
            known = called in "fgh" and isinstance(json.loads(arguments), dict)
            need(known, "a call of no tool", lambda: str(choice["calls"]))
            need(
                called == "h" or not strict or is_small(arguments),
                "arguments that the schema does not allow",
                lambda: str(choice["calls"]),
            )


def check_stop(case, facts, choice):
    """finish_reason and stop_reason must fit the request."""
    body, finish, reason = case.body, choice["finish_reason"], choice.get("stop_reason")
    need(finish in FINISHES, "finish_reason", lambda: repr(finish))
    if finish == "error":
        need(
            isinstance(choice.get("error"), dict) and choice["error"].get("message"),
            "an error without its object",
        )
        return
    need(
        finish in ("stop", "tool_calls", "function_call") or reason is None,
        "a stop_reason without a stop",
    )
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if isinstance(reason, str):
        need(reason in stops, "a stop_reason that was not asked for", lambda: repr(reason))
    elif reason is not None:
        need(
            reason in (body.get("stop_token_ids") or []),
            "a stop token that was not asked for",
            lambda: repr(reason),
        )
    elif finish == "stop" and not is_constrained(body):
        need(not body.get("ignore_eos") and facts.eos, "an end of sequence that was to be ignored")
    least, keep = body.get("min_tokens") or 0, body.get("include_stop_str_in_output")
    if not keep and not body.get("echo") and not least:
        for s in stops:
            need(
                s not in choice["text"],
                "a stop string in the text",
                lambda: f"{s!r} in {choice['text']!r}",
            )
    if keep and isinstance(reason, str):
        need(
            choice["text"].endswith(reason),
            "the stop string is missing",
            lambda: repr(choice["text"]),
        )


def most_tokens(case):
    body = case.body
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    return 16 if most is None and case.route == "/v1/completions" else most


def check_tokens(case, facts, choice):
    """The ids must obey the request's rules about tokens."""
    tokens, body, finish = choice.get("token_ids"), case.body, choice["finish_reason"]
    if tokens is None or finish == "error":
        return
    most = most_tokens(case)
    if most is not None:
        need(len(tokens) <= most, "more tokens than max_tokens", lambda: str(len(tokens)))
        # A default is lowered to what the pool holds.
        given = body.get("max_completion_tokens") or body.get("max_tokens")
        need(
            finish != "length" or len(tokens) == most or not (given or facts.fits(case.route, body)),
            "finish_reason length too early",
            lambda: f"{len(tokens)} tokens",
        )
    need(
        finish == "length"
        or is_constrained(body)
        or len(tokens) > (body.get("min_tokens") or 0),
        "an end before min_tokens",
        lambda: f"{len(tokens)} tokens",
    )
    allowed = body.get("allowed_token_ids")
    need(
        not allowed or set(tokens) <= set(allowed),
        "a token that is not allowed",
        lambda: str(tokens),
    )
    ends = set(body.get("stop_token_ids") or []) | (
        set() if body.get("ignore_eos") else set(facts.eos)
    )
    for i, token in enumerate(tokens[:-1]):
        need(
            token not in ends or i < (body.get("min_tokens") or 0),
            "a stop token inside",
            lambda: str(tokens),
        )


# ---- log-probabilities ----


def check_number(value, what):
    need(
        isinstance(value, (int, float)) and -1e5 < value <= 1e-3,
        "a log-probability that is none",
        lambda: f"{what} {value!r}",
    )


def check_offsets(choice, lp):
    """Each plain token is in the text at its offset; no offset is outside of it."""
    text, offsets = choice["text"], lp["text_offset"]
    before = 0
    for i, (token, at) in enumerate(zip(lp["tokens"], offsets)):
        need(
            before <= at <= len(text) or at == before,
            "text_offset",
            lambda: f"{at} of {token!r} in {text!r}",
        )
        before = at
        follows = text[at : offsets[i + 1]] if i + 1 < len(offsets) else text[at:]
        whole = not token.startswith("bytes:") and follows and "\ufffd" not in follows
        need(
            not whole or token.startswith(follows) or follows.startswith(token),
            "text_offset",
            lambda: f"{token!r} at {at} of {text!r}",
        )


def check_logprobs(case, choice):
    lp, k = choice.get("logprobs"), case.body.get("logprobs")
    if k is None or k is False or case.route != "/v1/completions":
        need(not lp or case.route != "/v1/completions", "logprobs that were not asked for")
        return
    need(lp is not None or choice.get("token_ids") in (None, []), "no logprobs")
    if lp is None:
        return
    n = len(lp["tokens"])
    need(
        all(len(lp[x]) == n for x in ("token_logprobs", "top_logprobs", "text_offset")),
        "logprobs of unequal length",
    )
    if not case.body.get("echo") and choice.get("token_ids") is not None:
        need(
            n == len(choice["token_ids"]),
            "as many logprobs as tokens",
            lambda: f"{n}, {len(choice['token_ids'])}",
        )
    for i, (token, value, top) in enumerate(
        zip(lp["tokens"], lp["token_logprobs"], lp["top_logprobs"])
    ):
        if i == 0 and case.body.get("echo"):
            need(value is None and top is None, "the first prompt token's log-probability")
            continue
        check_number(value, token)
        need(len(top) <= k + 1 and token in top, "top_logprobs", lambda: f"{token!r}: {top}")
        for other, v in top.items():
            check_number(v, other)
    check_offsets(choice, lp)


def check_chat_logprobs(case, choice):
    lp = choice.get("logprobs")
    if case.route != "/v1/chat/completions" or not case.body.get("logprobs") or not lp:
        return
    if choice.get("token_ids") is not None:
        need(len(lp["content"]) == len(choice["token_ids"]), "as many logprobs as tokens")
    for entry in lp["content"]:
        check_number(entry["logprob"], entry["token"])
        asked, told = case.body.get("top_logprobs") or 0, len(entry["top_logprobs"])
        rules = ("allowed_token_ids", "bad_words", "min_tokens", "logit_bias")
        banned = any(case.body.get(k) for k in rules) or is_constrained(case.body)
        banned = banned and is_beam(case.body)
        need(
            told == asked or (banned and told < asked),
            "top_logprobs",
            lambda: f"{len(entry['top_logprobs'])}",
        )
        for top in entry["top_logprobs"]:
            check_number(top["logprob"], top["token"])


def check_prompt_logprobs(case, choice):
    asked = case.body.get("prompt_logprobs")
    have = choice.get("prompt_logprobs")
    need((asked is None) == (have is None), "prompt_logprobs", lambda: f"asked {asked}, got {have}")
    if have is None:
        return
    ids = choice.get("prompt_token_ids")
    need(
        have[0] is None and (ids is None or len(have) == len(ids)),
        "prompt_logprobs of another length",
    )
    for i, entry in enumerate(have[1:], 1):
        need(
            asked <= len(entry) <= asked + 1 and (ids is None or str(ids[i]) in entry),
            "a prompt token without its own",
            lambda: str(entry),
        )
        for value in entry.values():
            check_number(value["logprob"], value["decoded_token"])


# ---- the whole ----


def check_usage(case, outcome):
    use = outcome.usage
    if use is None:
        return
    need(
        use["total_tokens"] == use["prompt_tokens"] + use["completion_tokens"],
        "usage does not add up",
        lambda: str(use),
    )
    need(
        0 <= use["prompt_tokens_details"]["cached_tokens"] <= use["prompt_tokens"],
        "cached_tokens",
        lambda: str(use),
    )
    if any(c.get("token_ids") is None for c in outcome.choices.values()):
        return
    made = sum(len(c["token_ids"]) for c in outcome.choices.values())
    ranked = not is_beam(case.body) and (case.body.get("best_of") or 0) > n_of(case.body)
    same = use["completion_tokens"] == made
    need(
        same or ((ranked or is_beam(case.body)) and use["completion_tokens"] > made),
        "usage does not count the tokens",
        lambda: f"{use['completion_tokens']}, choices have {made}",
    )
    prompts = [
        c["prompt_token_ids"] for i, c in outcome.choices.items() if i % n_of(case.body) == 0
    ]
    need(
        use["prompt_tokens"] == sum(map(len, prompts)),
        "usage does not count the prompts",
        lambda: str(use),
    )


def n_prompts(case):
    prompt = case.body.get("prompt")
    return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1


def check_unshared_noise(case, outcome):
    """Equal prompts without a seed must get different tokens: their texts are too long
    to agree by chance."""
    body, prompts = case.body, case.body.get("prompt")
    hot = (body.get("temperature") or 0) >= 1 and not any(
        body.get(k) for k in ("top_p", "top_k", "min_p", "logit_bias")
    )
    if (
        not hot
        or body.get("seed") is not None
        or body.get("allowed_token_ids")
        or is_constrained(body)
        or n_prompts(case) < 2
        or is_beam(body)
    ):
        return
    seen = {}
    for i, choice in sorted(outcome.choices.items()):
        lp = choice.get("logprobs")
        key = json.dumps([prompts[i // n_of(body)], choice.get("token_ids")])
        values = (
            lp["token_logprobs"][-len(choice["token_ids"]) :]
            if lp and choice.get("token_ids")
            else []
        )
        if values and sum(values) < -30:
            need(
                key not in seen,
                "equal samples without a seed",
                lambda: f"choices {seen[key]} and {i}: {choice['text']!r}",
            )
        seen[key] = i


def check_tokenizer(case, outcome):
    data = outcome.body
    if case.route == "/tokenize":
        need(
            data["count"] == len(data["tokens"]),
            "count is not the number of tokens",
            lambda: str(data),
        )
        need(
            not case.body.get("return_token_strs") or len(data["token_strs"]) == data["count"],
            "token_strs",
        )
    elif case.route == "/detokenize":
        need(isinstance(data["prompt"], str), "no prompt", lambda: str(data))


def check_agents(case, answer):
    """Likewise of /v1/responses and /v1/messages."""
    outcome = Outcome(answer.status)
    need(not answer.late, "hang", "no whole answer within the bound")
    need(not answer.cut, "connection cut", lambda: answer.body.decode())
    need(answer.status < 500 or answer.status == 503, str(answer.status), lambda: answer.body[:400].decode())
    if answer.status != 200:
        outcome.error = load(answer.body, "an error").get("error")
        need(outcome.error and outcome.error.get("message"), "an error without a message", lambda: repr(answer.body))
        return outcome
    streamed = answer.headers.get("content-type", "").startswith("text/event-stream")
    need(streamed == bool(case.body.get("stream")), "a stream that was not asked for, or none")
    outcome.choices[0] = combo_agents.read_answer(case.route, answer.body, streamed, need)
    return outcome


def check(case, answer, facts):
    """The Outcome of an answer; Broken if a law does not hold."""
    if case.route in combo_agents.ROUTES:
        return check_agents(case, answer)
    outcome = Outcome(answer.status)
    if answer.status >= 400 and answer.status != 500 and not answer.late and not answer.cut:
        read_error(outcome, answer.body)
    check_status(case, answer, outcome)
    if answer.status != 200:
        return outcome
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        need(case.body.get("stream"), "a stream that was not asked for")
        read_stream(outcome, answer.body, case)
    else:
        read_body(outcome, answer.body, case)
    if case.route not in GENERATING:
        check_tokenizer(case, outcome)
        return outcome
    need(outcome.error is None, "an error inside a stream", lambda: str(outcome.error))
    need(
        sorted(outcome.choices) == list(range(n_prompts(case) * n_of(case.body))),
        "not all choices",
        lambda: str(sorted(outcome.choices)),
    )
    for choice in outcome.choices.values():
        check_stop(case, facts, choice)
        check_constraint(case, choice)
        check_tokens(case, facts, choice)
        check_text(case, facts, choice)
        check_logprobs(case, choice)
        check_chat_logprobs(case, choice)
        check_prompt_logprobs(case, choice)
    check_usage(case, outcome)
    check_unshared_noise(case, outcome)
    return outcome


# ---- two outcomes ----

SAME = (
    "text",
    "calls",
    "finish_reason",
    "stop_reason",
    "token_ids",
    "prompt_token_ids",
    "logprobs",
    "prompt_logprobs",
)


def plain(value):
    """Without nulls and empty values, which a stream and one body write differently."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if v is not None and k != "refusal"} or None
    return value


def compare_choice(i, a, b, names, kind):
    for name in names:
        if name in a and name in b:
            x, y = a[name], b[name]
            if name.endswith("token_ids") and (x is None or y is None):
                continue
            if name == "logprobs":  # a stream leaves out the lists of a choice without tokens
                x, y = plain(x), plain(y)
                if not (x and y and any(x.values()) and any(y.values())):
                    continue
            need(x == y, f"{kind}: {name} differs", lambda: f"choice {i}: {x!r} and {y!r}")


def compare(a, b, kind, names=SAME):
    """Compare two outcomes of the same request. Fields that only one of them has are
    ignored."""
    if a.status in (429, 503) or b.status in (429, 503):
        return
    need(
        a.status == b.status,
        f"{kind}: status differs",
        lambda: f"{a.status} and {b.status}: {a.error or b.error}",
    )
    if a.error or b.error:
        need(
            (a.error or {}).get("param") == (b.error or {}).get("param"),
            f"{kind}: refusals differ",
            lambda: f"{a.error} and {b.error}",
        )
        return
    if not a.choices:
        need(a.body == b.body, f"{kind}: bodies differ", lambda: f"{a.body} and {b.body}")
        return
    need(a.choices.keys() == b.choices.keys(), f"{kind}: choices differ")
    for i in a.choices:
        compare_choice(i, a.choices[i], b.choices[i], names, kind)
    if a.usage and b.usage and names is SAME:
        x, y = (
            {k: u[k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")}
            for u in (a.usage, b.usage)
        )
        need(x == y, f"{kind}: usage differs", lambda: f"{x} and {y}")
