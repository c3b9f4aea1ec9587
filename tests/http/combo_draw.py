"""Random request bodies for tests/http/combinations.py.

The fields come from the server's own /openapi.json, which is printed from the table
in server/api/api_table.c. A field that is not named in IDEAS is generated from its schema
alone, so a new field is covered without a change here.
"""

import json
import math

# Fragments of the bundled model's output, so that stop strings and bad words occur.
TEXT = (
    "Once upon a time, there was a little girl named Lily. She lived in a cozy little house "
    "with her mom and dad. One day, Lily went to the park to play with her friends. They saw "
    "a big red ball and wanted to play with it. \"Can I have it?\" she asked. Her mom smiled "
    "and said, \"Yes, you can.\" They were very happy and the dog said thank you."
)
ODD_TEXTS = [
    "é",
    "日本語",
    "🦊 fox",
    "a\u0300",
    "\n\n",
    " ",
    "\t",
    "\u200b",
    "<s>",
    "</s>",
    "\ufffd",
    "ß\u0000x",
    "\\\"",
    "{{ x }}",
    "𝔘",
    "\r\n",
    "a" * 60,
    "\u2028",
    "\x7f",
    "0",
    "()",
]
ROUTES = {"/v1/completions": 60, "/v1/chat/completions": 30, "/tokenize": 10, "/detokenize": 10}
SKIP = object()
GENERATING = ("/v1/completions", "/v1/chat/completions")
SHORT_BODY = 32 * 1024  # bytes of the longest body that workers do not handle
CUT = "truncate_prompt_tokens"


class Raw(str):
    """JSON text that is inserted into a body unchanged: numbers that Python would not
    write."""


def dumps(body):
    """A body's JSON text, with every Raw inserted unchanged."""
    raw = []

    def mark(value):
        if isinstance(value, Raw):
            raw.append(value)
            return f"@raw{len(raw) - 1}@"
        if isinstance(value, dict):
            return {k: mark(v) for k, v in value.items()}
        return [mark(v) for v in value] if isinstance(value, list) else value

    text = json.dumps(mark(body), ensure_ascii=False, separators=(",", ":"))
    for i, value in enumerate(raw):
        text = text.replace(f'"@raw{i}@"', value)
    return text


# ---- JSON Schema: as much of it as the document uses ----


def branches(schema):
    """The alternative schemas, without `null`."""
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return [b for s in schema[key] for b in branches(s) if b.get("type") != "null"]
    return [schema]


def is_type(kind, value):
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {
        "string": isinstance(value, str) and not isinstance(value, Raw),
        "boolean": isinstance(value, bool),
        "integer": number and isinstance(value, int),
        "number": number,
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
        "null": value is None,
    }[kind]


def sizes_hold(schema, value):
    for low, high, kind in (
        ("minLength", "maxLength", str),
        ("minItems", "maxItems", list),
        ("minProperties", "maxProperties", dict),
    ):
        if isinstance(value, kind) and not schema.get(low, 0) <= len(value) <= schema.get(
            high, 1 << 60
        ):
            return False
    return True


def holds(schema, value):
    """Whether `value` satisfies `schema`; `null` does not."""
    options = branches(schema)
    if len(options) > 1 or options[0] is not schema:
        return any(holds(o, value) for o in options)
    if "const" in schema:
        return value == schema["const"]
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "type" in schema and not is_type(schema["type"], value):
        return False
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
    if isinstance(value, list):
        return sizes_hold(schema, value) and all(holds(schema.get("items", {}), v) for v in value)
    if isinstance(value, dict):
        known = schema.get("properties", {})
        rest = schema.get("additionalProperties", {})
        return (
            sizes_hold(schema, value)
            and all(k in value for k in schema.get("required", ()))
            and all(
                holds(known.get(k, rest if isinstance(rest, dict) else {}), v)
                for k, v in value.items()
            )
        )
    return sizes_hold(schema, value)


def draw_number(rng, schema):
    low, high = schema.get("minimum", -1000), schema.get("maximum", 1000)
    near = [
        low,
        high,
        max(low, min(high, 0)),
        max(low, min(high, 1)),
        max(low, min(high, rng.randint(2, 30))),
    ]
    value = rng.choice(near)
    if schema["type"] == "number" and rng.random() < 0.5:
        value = rng.uniform(max(low, -10), min(high, 10))
    return value if schema["type"] == "number" else int(value)


def draw_schema(rng, schema):
    """A value that `schema` allows."""
    schema = rng.choice(branches(schema))
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema.get("type", "string")
    if kind in ("integer", "number"):
        return draw_number(rng, schema)
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "array":
        least = schema.get("minItems", 0)
        n = rng.randint(least, max(least, min(schema.get("maxItems", 3), 3)))
        return [draw_schema(rng, schema.get("items", {})) for _ in range(n)]
    if kind == "object":
        known = schema.get("properties", {})
        wanted = set(schema.get("required", ()))
        return {
            k: draw_schema(rng, v) for k, v in known.items() if k in wanted or rng.random() < 0.5
        }
    if "pattern" in schema:
        return "a1"
    text = rng.choice(ODD_TEXTS) if rng.random() < 0.3 else TEXT[: rng.randint(1, 12)]
    return (text + "x" * schema.get("minLength", 0))[: schema.get("maxLength", 200)]


NUMBERS = [-1, 1.5, -(2**63) - 1, 2**64, 2**31, 10**30, 1e300, -1e300] + [
    Raw(text)
    for text in (
        "0." + "0" * 400 + "1",
        "1e400",
        "-1e400",
        "1" + "0" * 500,
        "18446744073709551616",
        "9007199254740993.5",
        "1.0000000000000000000001",
        "2147483647.0000000001",
        "NaN",
        "01",
    )
]
OTHERS = [
    True,
    False,
    "x",
    "",
    "1",
    [],
    {},
    [[]],
    [None],
    ["x"],
    [""],
    {"a": 1},
    {"-1": 1},
    {"1": "x"},
    {"1": 1e9},
]


def draw_wrong(rng, schema):
    """A value that `schema` refuses, or SKIP where none is known."""
    kinds = {b.get("type") for b in branches(schema)}
    numbers = NUMBERS
    if "number" in kinds:  # any number of digits is valid by itself
        numbers = [
            v for v in NUMBERS if not isinstance(v, Raw) or v in ("1e400", "-1e400", "NaN", "01")
        ]
    few = numbers if kinds & {"integer", "number"} and rng.random() < 0.6 else numbers + OTHERS
    if "array" in kinds and rng.random() < 0.3:
        few = [[v] for v in NUMBERS]
    wrong = [v for v in few if isinstance(v, Raw) or not holds(schema, v)]
    return rng.choice(wrong) if wrong else SKIP


# ---- what is known of some fields ----


def some_text(rng, least=1, most=60):
    at = rng.randrange(len(TEXT) - most)
    text = TEXT[at : at + rng.randint(least, most)]
    return rng.choice(ODD_TEXTS) + text if rng.random() < 0.15 else text


def story(rng):
    """A prompt; many have the same beginning, so that the prefix cache is hit."""
    if rng.random() < 0.5:
        return TEXT[: rng.choice([4, 16, 40, 90, 140])] + rng.choice(
            ["", " ", " The", " And then", "."]
        )
    if rng.random() < 0.15:
        return rng.choice(ODD_TEXTS)
    return some_text(rng, 1, 90)


def draw_prompt(rng, facts):
    def ids():
        return [rng.choice(facts.likely_ids) for _ in range(rng.choice([1, 2, 5, 17, 33]))]

    kind = rng.random()
    if kind < 0.62:
        return story(rng)
    if kind < 0.75:
        return ids()
    several = [story(rng) if kind < 0.92 else ids() for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.3:
        several.append(several[0])
    return several


def draw_messages(rng, facts):
    roles = ["user", "assistant"] * rng.randint(1, 2)
    messages = [{"role": r, "content": story(rng)[:60]} for r in roles[:-1]]
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": some_text(rng, 1, 20)})
    if rng.random() < 0.2:
        messages[-1]["content"] = [{"type": "text", "text": some_text(rng)}]
    return messages


def few_ids(rng, facts, most=4):
    return [rng.choice(facts.likely_ids) for _ in range(rng.randint(1, most))]


def draw_stop(rng, facts):
    def one():
        return (
            rng.choice(ODD_TEXTS)
            if rng.random() < 0.1
            else some_text(rng, 1, rng.choice([1, 2, 4, 14]))
        )

    return one() if rng.random() < 0.5 else [one() for _ in range(rng.randint(0, 4))]


def draw_seed(rng, facts):
    return rng.choice([0, 1, -1, 7, 2**63, 2**64 - 1, -(2**63), rng.getrandbits(40)])


def draw_bias(rng, facts):
    ids = few_ids(rng, facts, 6) + (facts.eos if rng.random() < 0.3 else [])
    return {str(i): rng.choice([-100, -2.5, 0, 1, 5, 100]) for i in ids}


def draw_allowed(rng, facts):
    n = rng.choice([1, 2, 40, 300])
    ids = rng.sample(facts.likely_ids, min(n, len(facts.likely_ids)))
    return ids + (facts.eos if rng.random() < 0.3 else []) + ids[:1]


def draw_tokens(rng, facts):
    return few_ids(rng, facts, 40) if rng.random() < 0.9 else []


def choose(*values):
    return lambda rng, facts: rng.choice(values)


# What constrained answers must be: as the request's field says, and as combo_laws checks.
SMALL_SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", 1, None]}, "b": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", "日本", "a\nb"]
EXPRESSION = "[ab]{1,3}(c|[0-9])"
# A frequent word of the bundled model's stories begins a tag, so that tags are met.
TAG_BEGIN, TAG_END = " and", "!"
TAGS = {
    "structures": [{"begin": TAG_BEGIN, "schema": SMALL_SCHEMA, "end": TAG_END}],
    "triggers": [TAG_BEGIN],
}
CONSTRAINTS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_json_object",
)
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SMALL_SCHEMA}},
    {"type": "function", "function": {"name": "g", "strict": True, "parameters": SMALL_SCHEMA}},
    {"type": "function", "function": {"name": "h", "description": "é"}},
]


def draw_tools(rng, facts):
    return rng.sample(TOOLS, rng.randint(0, 3))


def draw_structured(rng, facts):
    return rng.choice(
        [
            {"json": SMALL_SCHEMA},
            {"json": json.dumps(SMALL_SCHEMA)},
            {"regex": EXPRESSION},
            {"choice": CHOICES},
            {"grammar": f"start: /{EXPRESSION}/"},
            {"json_object": True},
            {"structural_tag": TAGS},
            {},
        ]
    )


def draw_format(rng, facts):
    schema = {"name": "s", "schema": SMALL_SCHEMA}
    return rng.choice(
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": schema},
            {"type": "json_schema", "json_schema": schema | {"strict": True}},
            {"type": "structural_tag"} | TAGS,
        ]
    )


# Name: (probability, generator). A field that is not listed is generated from its schema.
IDEAS = {
    "prompt": (1, draw_prompt),
    "messages": (1, draw_messages),
    "tokens": (1, draw_tokens),
    "model": (0.05, lambda rng, facts: facts.model),
    "max_tokens": (0.85, choose(1, 2, 3, 5, 8, 12, 16, 24, 40)),
    "max_completion_tokens": (0.3, choose(1, 2, 5, 12, 24)),
    "min_tokens": (0.15, choose(0, 1, 2, 5, 12)),
    "n": (0.3, choose(1, 2, 3, 5)),
    "best_of": (0.12, choose(1, 2, 4, 6)),
    "use_beam_search": (0.3, choose(True, True, True, False)),
    "beam_width": (0.2, choose(1, 2, 3, 6)),
    "length_penalty": (0.15, choose(0, 1, -1.5, 2.0, 1e30)),
    "early_stopping": (0.2, choose(True, False, "never")),
    "temperature": (0.7, choose(0, 0, 0.3, 1, 1.5, 2)),
    "top_p": (0.2, choose(1, 0.9, 0.1, 1e-9)),
    "top_k": (0.2, choose(-1, 0, 1, 3, 50, 100000)),
    "min_p": (0.15, choose(0, 0.05, 1)),
    "presence_penalty": (0.12, choose(0, 1, -2, 2)),
    "frequency_penalty": (0.12, choose(0, 0.5, -2, 2)),
    "repetition_penalty": (0.12, choose(1, 1.2, 0.5, 5.0, 1e-38, 1e38)),
    "logit_bias": (0.12, draw_bias),
    "seed": (0.7, draw_seed),
    "stop": (0.3, draw_stop),
    "stop_token_ids": (0.2, few_ids),
    "allowed_token_ids": (0.12, draw_allowed),
    "bad_words": (
        0.12,
        lambda rng, facts: [
            some_text(rng, 1, 9).encode()[:12].decode(errors="ignore").strip() or "a"
            for _ in range(rng.randint(0, 3))
        ],
    ),
    "echo": (0.2, choose(True, True, False)),
    "prompt_logprobs": (0.12, choose(0, 1, 5, 20)),
    "stream_options": (0.2, None),
    "suffix": (0.03, None),
    "response_format": (0.06, draw_format),
    "structured_outputs": (0.04, draw_structured),
    "guided_json": (0.02, choose(SMALL_SCHEMA, json.dumps(SMALL_SCHEMA))),
    "guided_regex": (0.02, choose(EXPRESSION)),
    "guided_choice": (0.02, choose(CHOICES, CHOICES[:1])),
    "guided_grammar": (0.02, choose(f"start: /{EXPRESSION}/")),
    "guided_json_object": (0.02, choose(True, False)),
    "tools": (0.2, draw_tools),
    "tool_choice": (
        0.1,
        choose(
            "auto", "none", "required", {"type": "function", "function": {"name": "f"}}
        ),
    ),
    "functions": (0.03, lambda rng, facts: [t["function"] for t in draw_tools(rng, facts)]),
    "function_call": (0.03, choose("auto", "none", {"name": "f"})),
    "parallel_tool_calls": (0.1, choose(True, False)),
    "prediction": (0.03, choose({"type": "content", "content": "x"})),
    "metadata": (0.03, choose({}, {"a": "b"})),
    "truncate_prompt_tokens": (0.1, choose(1, 2, 5, 30, 1000)),
    "cache_salt": (0.1, choose("a", "é", "x" * 256)),
    "request_id": (0.05, None),
    "user": (0.05, choose("u", "")),
    "stream": (0.4, choose(True, True, False)),
    "return_token_ids": (0.3, choose(True, False)),
    "priority": (0.15, choose(0, -5, 3, 2**31 - 1)),
    "chat_template_kwargs": (0.05, choose({}, {"who": "me"})),
    "continue_final_message": (0.1, choose(True, False)),
    "add_generation_prompt": (0.1, choose(True, False)),
}


def plain_prompt(rng, facts):
    """/tokenize: any text, even an empty one."""
    return "" if rng.random() < 0.05 else story(rng)


def draw_field(rng, facts, route, name, schema):
    often, how = IDEAS.get(name, (0.12, None))
    if route == "/tokenize" and name == "prompt":
        how = plain_prompt
    if name == "logprobs" or name == "top_logprobs":
        often = 0.25
    if rng.random() >= often:
        return SKIP
    if (
        how is None
        and name == "logprobs"
        and any(b.get("type") == "integer" for b in branches(schema))
    ):
        return rng.choice([0, 1, 2, 5, 20])
    value = how(rng, facts) if how else draw_schema(rng, schema)
    outside = isinstance(value, (int, float)) and not holds(schema, value)
    return SKIP if outside else value


# ---- rules between fields ----


def n_of(body):
    return body.get("n") or 1


def is_beam(body):
    return body.get("use_beam_search") is True


def width_of(body):
    """The number of sequences of one prompt."""
    if is_beam(body):
        return body.get("beam_width") or body.get("best_of") or n_of(body)
    return body.get("best_of") or n_of(body)


def mend_decoding(body, facts):
    most = max(1, facts.max_num_seqs)
    for name in ("n", "best_of", "beam_width"):
        if isinstance(body.get(name), int):
            body[name] = min(body[name], most)
    if is_beam(body):
        body.pop("best_of", None)
        if body.get("temperature"):
            body.pop("temperature")
        if body.get("beam_width") is not None:
            body["beam_width"] = max(body["beam_width"], n_of(body))
        return
    for name in ("beam_width", "length_penalty", "early_stopping"):
        body.pop(name, None)
    if body.get("best_of") is not None:
        body["best_of"] = n_of(body) if body.get("stream") else max(body["best_of"], n_of(body))
    if body.get("temperature") == 0:
        body.pop("n", None)
        body.pop("best_of", None)


def mend_lengths(rng, body, route):
    if route == "/v1/completions" and body.get("echo") and rng.random() < 0.25:
        body["max_tokens"] = 0
    if (
        route == "/v1/chat/completions"
        and body.get("max_completion_tokens") is None
        and rng.random() < 0.9
    ):
        body.setdefault("max_tokens", 12)
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    least = body.get("min_tokens") or 0
    if least > (most if most is not None else 16):
        body.pop("min_tokens")
    if body.get("suffix") is not None and (body.get("echo") or body.get("truncate_prompt_tokens")):
        body.pop("suffix")


def constraint_of(body):
    """The field that constrains the answer, or None."""
    for name in CONSTRAINTS:
        value = body.get(name)
        idle = value in (None, False, {}) or value == {"type": "text"}
        if not idle:
            return name
    return None


def calls_wanted(body):
    """Whether the request has tools that may be called."""
    if body.get("tools"):
        return body.get("tool_choice") != "none"
    return bool(body.get("functions")) and body.get("function_call") != "none"


def is_constrained(body):
    """Whether a grammar may have a say in the answer."""
    return bool(constraint_of(body) or calls_wanted(body))


def mend_tools(body):
    name, tools = constraint_of(body), body.get("tools")
    for other in CONSTRAINTS:
        if other != name:
            body.pop(other, None)
    for older in ("functions", "function_call") if tools else ("tool_choice",):
        body.pop(older, None)
    if not body.get("functions"):
        body.pop("function_call", None)
    for field, names in (
        ("tool_choice", [t["function"]["name"] for t in tools or []]),
        ("function_call", [f["name"] for f in body.get("functions") or []]),
    ):
        choice = body.get(field)
        if isinstance(choice, dict) and "f" not in names:
            body.pop(field)
    if calls_wanted(body) and name not in (None, "response_format", "guided_json"):
        body.pop(name)


def mend(rng, body, route, facts):
    """Changes a random body so that it breaks no rule between fields."""
    mend_tools(body)
    mend_decoding(body, facts)
    mend_lengths(rng, body, route)
    if not body.get("stream"):
        body.pop("stream_options", None)
    if body.get("top_logprobs") and body.get("logprobs") is not True:
        body["logprobs"] = True
    if body.get("continue_final_message"):
        body.pop("add_generation_prompt", None)
    if body.get("continue_final_message") is not None and route == "/v1/chat/completions":
        if isinstance(body["messages"][-1]["content"], list):
            body.pop("continue_final_message")


class Case:
    """One random request, and what is expected of the answer.

    `spoiled`: the one field with a value that its schema refuses. `rough`: rules between
    fields may be broken, too, and a refusal may name any of them. `clean`: it must be
    answered with 200. `padding`: bytes of white space among the members and behind them.
    """

    def __init__(self, route, body, spoiled=None, clean=False, rough=False, padding=0):
        self.route, self.body = route, body
        self.spoiled, self.clean, self.rough = spoiled, clean, rough
        self.padding = padding

    def with_body(self, body):
        """The case with another body."""
        return Case(self.route, body, self.spoiled, self.clean, self.rough, self.padding)

    def text(self):
        text, blank = dumps(self.body), (" \n\t\r" * (self.padding // 4 + 1))[: self.padding]
        return text[:1] + blank[::2] + text[1:] + blank[1::2]

    def is_long(self):
        """Whether workers handle the body."""
        return len(self.text().encode("utf-8", "surrogatepass")) > SHORT_BODY

    def __repr__(self):
        text, pad = dumps(self.body), f" and {self.padding} of white space" if self.padding else ""
        cut = f"{text[:600]} ... {text[-600:]} ({len(text)} characters)" if len(text) > 2000 else text
        return f"{self.route} {cut}{pad}"


def may_be_impossible(body):
    """Whether the rules about tokens may leave no token to sample, or no finite logit."""
    bans = any(body.get(k) for k in ("bad_words", "min_tokens", "logit_bias"))
    penalty = body.get("repetition_penalty") or 1
    return (
        bool(body.get("allowed_token_ids") and bans)
        or not 1e-6 < penalty < 1e6
        or bool(body.get("logit_bias"))
    )


def tighten(rng, body):
    """Sometimes rules about tokens that leave none to sample: all allowed ones are also
    banned."""
    if body.get("allowed_token_ids") and rng.random() < 0.3:
        only = body["allowed_token_ids"][0]
        body |= {"allowed_token_ids": [only], "stop_token_ids": [only]}
        if (body.get("max_tokens") or 0) > 1:
            body["min_tokens"] = 1


def is_clean(case, facts):
    body = case.body
    if case.spoiled or any(k not in IDEAS and k not in facts.known for k in body):
        return False
    if case.route in ("/tokenize", "/detokenize"):
        return True
    if case.route == "/v1/chat/completions" and not facts.chat:
        return False
    if is_constrained(body):
        return False  # not every combination with a grammar is possible
    if (
        may_be_impossible(body)
        or body.get("suffix")
        or "\0" in case.text()
        or "\\u0000" in case.text()
    ):
        return False
    return facts.fits(case.route, body)


def long_text(rng):
    """A text that takes long to be encoded; its end is a story's."""
    piece = rng.choice([TEXT, "a", " ", "\n", "é", "{'x': 1}, ", "日本語"])
    return piece * (rng.choice([40_000, 90_000]) // len(piece.encode())) + story(rng)


def draw_long(rng, facts, case):
    """Makes the text of a case long, of which the model gets the end. False: it has none."""
    body = case.body
    ids = [rng.choice(facts.likely_ids) for _ in range(20)] * 900
    if case.route == "/detokenize" and case.spoiled != "tokens":
        body["tokens"] = ids
    elif case.route == "/tokenize" and case.spoiled != "prompt":
        body["prompt"] = long_text(rng)
    elif body.get("suffix") is not None or case.spoiled in ("prompt", "messages", CUT):
        return False
    elif case.route == "/v1/completions":
        old, prompt = body["prompt"], rng.choice([long_text(rng), ids])
        alike = isinstance(old, list) and isinstance(old[0], type(prompt))
        body |= {"prompt": [prompt, *old] if alike else prompt, CUT: rng.choice([1, 5, 17, 30])}
    elif case.route == "/v1/chat/completions":
        body["messages"][0]["content"] = long_text(rng)
        body[CUT] = rng.choice([5, 17, 30])
    else:
        return False
    return True


def lengthen(rng, facts, case):
    """Makes a body so long that workers handle it."""
    if rng.random() < 0.5 or not draw_long(rng, facts, case):
        case.padding = rng.choice([SHORT_BODY, 50_000, 150_000])


def draw_case(rng, facts):
    """One request for one of the routes; most are accepted."""
    route = rng.choices(list(facts.schemas), [ROUTES.get(r, 3) for r in facts.schemas])[0]
    schema = facts.schemas[route]
    body = {}
    for name, rule in schema["properties"].items():
        value = draw_field(rng, facts, route, name, rule)
        if value is not SKIP or name in schema["required"]:
            body[name] = value if value is not SKIP else draw_schema(rng, rule)
    rough = rng.random() < 0.06
    if not rough and route in GENERATING:
        mend(rng, body, route, facts)
        tighten(rng, body)
    case = Case(route, body, rough=rough)
    if rng.random() < 0.1:
        name = rng.choice(list(schema["properties"]))
        value = draw_wrong(rng, schema["properties"][name])
        if value is not SKIP:
            body[name] = value
            case.spoiled = name
    if rng.random() < 0.15:
        lengthen(rng, facts, case)
    case.clean = not rough and is_clean(case, facts)
    return case
