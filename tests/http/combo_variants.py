"""The same request in another form, whose answer must be equal, or equal in a known part.

Each function of VARIANTS takes (rng, case, base outcome, facts) and returns the other
case and a function that compares (base, other), or None if it does not apply. Its result
depends only on its arguments, so that a failure can be shrunk.
"""

import combo_agents
from combo_draw import GENERATING, SHORT_BODY, TEXT, is_beam, n_of, width_of
from combo_laws import SAME, compare, n_prompts, need

UNSEEDED = ("prompt_token_ids", "prompt_logprobs")


def is_fixed(case, facts):
    """Whether the tokens depend on the request alone. Those of the null model depend on seeds
    alone."""
    body = case.body
    greedy = is_beam(body) or body.get("temperature") == 0
    return case.route not in GENERATING or body.get("seed") is not None or (greedy and facts.greedy)


def names_for(case, facts):
    return SAME if is_fixed(case, facts) else UNSEEDED


def other(case, **fields):
    """The same case with some fields changed; None removes a field."""
    body = {k: v for k, v in (case.body | fields).items() if not (k in fields and v is None)}
    return case.with_body(body)


def samples(case):
    return not is_beam(case.body) and (case.body.get("best_of") or n_of(case.body)) == n_of(
        case.body
    )


def again(rng, case, base, facts):
    keys = list(case.body)
    rng.shuffle(keys)
    twin = case.with_body({k: case.body[k] for k in keys})
    return twin, lambda a, b: compare(a, b, "again", names_for(case, facts))


def padded(rng, case, base, facts):
    """White space makes a body long, which a worker handles then, and changes nothing."""
    twin = case.with_body(case.body)
    twin.padding = 0 if case.padding else rng.choice([SHORT_BODY, 150_000])
    return twin, lambda a, b: compare(a, b, "with white space or without", names_for(case, facts))


def stream(rng, case, base, facts):
    """A stream has the same content as the body."""
    if case.route not in GENERATING or case.spoiled or base.status != 200:
        return None
    if case.body.get("stream"):
        twin = other(case, stream=False, stream_options=None)
    elif not is_beam(case.body) and not samples(case):
        return None
    else:
        twin = other(case, stream=True, stream_options={"include_usage": rng.random() < 0.7})
    return twin, lambda a, b: compare(a, b, "streamed or not", names_for(case, facts))


def nulls(rng, case, base, facts):
    """A field that is null counts as absent."""
    schema = facts.schemas[case.route]
    absent = [k for k in schema["properties"] if k not in case.body and k not in schema["required"]]
    picked = rng.sample(absent, min(3, len(absent)))
    twin = case.with_body(case.body | {k: None for k in picked})
    return twin, lambda a, b: compare(a, b, "null or absent", names_for(case, facts))


def one_prompt(rng, case, base, facts):
    """A prompt in a list gives the same answer as alone."""
    if (
        case.route != "/v1/completions"
        or base.status != 200
        or n_prompts(case) < 2
        or not is_fixed(case, facts)
    ):
        return None
    i, n = rng.randrange(n_prompts(case)), n_of(case.body)

    def part(a, b):
        kept = {
            k - i * n: dict(c, index=k - i * n)
            for k, c in a.choices.items()
            if i * n <= k < (i + 1) * n
        }
        a, a.choices = a.copy(), kept
        compare(a, b, "a prompt of a list or alone", SAME[:])

    return other(case, prompt=case.body["prompt"][i]), part


def one_choice(rng, case, base, facts):
    """The first of n choices is that of n 1; for beams, at the same width."""
    if (
        base.status != 200
        or n_of(case.body) < 2
        or not is_fixed(case, facts)
        or case.route not in GENERATING
    ):
        return None
    lengths = ("max_tokens", "max_completion_tokens")
    if case.route == "/v1/chat/completions" and not any(case.body.get(k) for k in lengths):
        return None  # the maximum length of an answer depends on the blocks that n choices leave
    if is_beam(case.body):
        twin = other(case, n=1, beam_width=width_of(case.body), best_of=None)
    elif samples(case):
        twin = other(case, n=1, best_of=None)
    else:
        return None

    def first(a, b):
        n, a, kept = n_of(case.body), a.copy(), {}
        for i in range(n_prompts(case)):
            kept[i] = a.choices[i * n]
        a.choices = kept
        compare(a, b, "the first of n or n 1", SAME[:])

    return twin, first


def shorter(rng, case, base, facts):
    """A smaller max_tokens gives a prefix of the same tokens."""
    body = case.body
    name = "max_completion_tokens" if body.get("max_completion_tokens") else "max_tokens"
    most = body.get(name)
    if (
        base.status != 200
        or not samples(case)
        or not is_fixed(case, facts)
        or not isinstance(most, int)
        or most < 2
    ):
        return None
    most = rng.randint(1, most - 1)
    if (body.get("min_tokens") or 0) > most or case.route not in GENERATING:
        return None

    def begins(a, b):
        for i in a.choices.keys() & b.choices.keys():
            x, y = a.choices[i].get("token_ids"), b.choices[i].get("token_ids")
            need(
                x is None or y is None or x[:most] == y,
                "a smaller max_tokens gives other tokens",
                lambda: f"{x} and {y}",
            )

    return other(case, **{name: most, "return_token_ids": True}), begins


def by_ids(rng, case, base, facts):
    """A prompt as ids gives the same answer as the prompt as text."""
    if (
        case.route != "/v1/completions"
        or base.status != 200
        or n_prompts(case) > 1
        or 0 not in base.choices
    ):
        return None
    ids = base.choices[0].get("prompt_token_ids")
    if not ids or case.body.get("suffix"):
        return None
    twin = other(case, prompt=ids, truncate_prompt_tokens=None, add_special_tokens=None)
    return twin, lambda a, b: compare(a, b, "a prompt as ids or as text", names_for(case, facts))


def more_told(rng, case, base, facts):
    """Additional output does not change the text."""
    if base.status != 200 or case.route not in GENERATING:
        return None
    told = 3 if case.route == "/v1/completions" else True
    fields = {"logprobs": told, "return_token_ids": True}
    if case.route == "/v1/completions":
        fields["prompt_logprobs"] = case.body.get("prompt_logprobs") or 2
    elif case.body.get("top_logprobs") is None:
        fields["top_logprobs"] = 2
    names = ("text", "finish_reason", "stop_reason", "token_ids", "prompt_token_ids")
    names = names if is_fixed(case, facts) else ("prompt_token_ids",)
    return other(case, **fields), lambda a, b: compare(a, b, "with logprobs or without", names)


def echoed(rng, case, base, facts):
    """echo puts the prompt before the text and changes nothing after it."""
    if (
        case.route != "/v1/completions"
        or base.status != 200
        or case.body.get("echo")
        or case.body.get("suffix")
    ):
        return None
    names = (
        ("finish_reason", "stop_reason", "token_ids", "prompt_token_ids")
        if is_fixed(case, facts)
        else UNSEEDED
    )
    cut = any("\ufffd" in c["text"] for c in base.choices.values())
    if cut:  # a prompt may end inside a character that its answer completes
        return None
    return other(case, echo=True, return_token_ids=True), lambda a, b: compare(
        a, b, "with echo or without", names
    )


def cut_by_stop(rng, case, base, facts):
    """A stop string taken from the text ends it there, and is reported."""
    if (
        base.status != 200
        or not samples(case)
        or not is_fixed(case, facts)
        or case.route not in GENERATING
    ):
        return None
    text = base.choices[0]["text"]
    plain = not any(
        case.body.get(k) for k in ("stop", "min_tokens", "echo", "include_stop_str_in_output")
    )
    if not plain or n_of(case.body) * n_prompts(case) > 1 or len(text) < 2 or "\ufffd" in text:
        return None
    at = rng.randrange(len(text))
    stop = text[at : at + rng.randint(1, 6)]

    def cut(a, b):
        got, want = b.choices.get(0), a.choices[0]["text"]
        if b.status == 200 and "\ufffd" not in want and stop in want:
            need(
                (got["text"], got["stop_reason"]) == (want[: want.index(stop)], stop),
                "a stop string does not cut",
                lambda: f"{want!r} cut by {stop!r} gives {got['text']!r}, {got['stop_reason']!r}",
            )

    return other(case, stop=stop), cut


def beam_stop(rng, case, base, facts):
    """A beam search with stop strings, with one hypothesis and with all of them."""
    if (
        base.status != 200
        or not is_beam(case.body)
        or case.route not in GENERATING
        or case.body.get("stop")
    ):
        return None
    text = base.choices[0]["text"] or TEXT
    at = rng.randrange(len(text))
    return (
        other(case, stop=text[at : at + rng.randint(1, 14)], return_token_ids=True),
        lambda a, b: None,
    )


def over_another_api(rng, case, base, facts):
    """A chat as a body of another API is answered, and means the same."""
    route = rng.choice(list(combo_agents.ROUTES))
    twin = combo_agents.over(case, route) if base.status == 200 else None
    if not twin:
        return None
    if rng.random() < 0.3:
        twin.body["stream"] = not twin.body.get("stream")
    comparable = samples(case) and is_fixed(case, facts) and combo_agents.same_meaning(case, route)

    def same(a, b):
        need(b.status == 200, "refused over another API", lambda: f"{route}: {b.error}")
        if comparable:
            x, y = combo_agents.comparable(a.choices[0]), combo_agents.comparable(b.choices[0])
            need(x == y, f"another answer over {route}", lambda: f"{x} and {y}")

    return twin, same


VARIANTS = {
    f.__name__: f
    for f in (
        again,
        padded,
        stream,
        nulls,
        one_prompt,
        one_choice,
        shorter,
        by_ids,
        more_told,
        echoed,
        cut_by_stop,
        beam_stop,
        over_another_api,
    )
}


def choose(rng, case, base, facts):
    """The name of a random variant that applies."""
    names = list(VARIANTS)
    rng.shuffle(names)
    if rng.random() < 0.4:  # few cases are chats
        names.insert(0, over_another_api.__name__)
    for name in names:
        if VARIANTS[name](rng, case, base, facts):
            return name
    return "again"
