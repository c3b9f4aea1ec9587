#!/usr/bin/env python3
"""A coding agent's turns, and how much of each prompt is computed again.

    tests/bench/agent_trace.py [--model DIR] [--api messages|responses|chat] [--turns 33] [--from N] [--to N]
                               [--length N] [--layers N] [--hybrid KIND] [-- FLAGS]

Each turn sends the whole conversation: a system prompt (whose attribution header changes from turn to turn), tools,
the user's task, and of every earlier turn the model's own answer, a call and its result, now and then behind a system
message that counts tokens. The script makes the calls and their results, of a size that lets the prompt grow from N
to N tokens: by default to nearly the model's length, from 15 % of that, as 12,000 to 80,000 (--length 86016
--from 12000 --to 80000; --layers 1 leaves out all but the demo model's first, which makes that cheap). With --hybrid
the model is one of random weights with recurrent states, of a kind of tests/http/hybrid_model.py. Prints, a turn a line,
the prompt's tokens, those that the prompt before did not have, those that the prefix cache had, and those that were
computed although the prompt before had them.
"""
import argparse
import json
import pathlib
import random
import re
import shutil
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "http"))

# Calls and results as some models write them, for the demo model, which has no template for them.
TEMPLATE = """{%- if tools %}<system>{% for t in tools %}{{ t.function.name }}: {{ t.function.description }} {{ t.function.parameters | tojson }}
{% endfor %}{% endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
WORDS = "the little dog ran to a big tree and saw his friend there with red ball they played all day in sun".split()


class Trace:
    """The conversation, in the form of one API."""

    def __init__(self, api, model, seed=1):
        self.api, self.model, self.random = api, model, random.Random(seed)
        self.turns = []
        self.task = self.text(40)
        self.tools = [("read", "Read a file."), ("edit", "Change a file."), ("run", "Run a command.")]

    def text(self, n_words):
        return " ".join(self.random.choice(WORDS) for _ in range(max(n_words, 1)))

    def add(self, answer, n_words):
        """A turn has ended: the model answered, the agent ran a tool."""
        n = len(self.turns)
        reminder = f"{90000 - 700 * n} tokens left" if n % 3 == 2 else None
        self.turns.append((answer, f"call{n:05}", {"path": self.text(2)}, self.text(n_words), reminder))

    def body(self, max_tokens=4, **fields):
        common = {"model": self.model, "temperature": 0, **fields}
        if self.api == "messages":
            return common | {"max_tokens": max_tokens, "messages": list(self.messages()), "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={self.random.getrandbits(20):05x};"},
                {"type": "text", "text": "You change programs.", "cache_control": {"type": "ephemeral"}}], "tools": [
                {"name": n, "description": d, "input_schema": self.schema()} for n, d in self.tools]}
        if self.api == "chat":
            return common | {"max_tokens": max_tokens, "messages": list(self.chat()), "tools": [
                {"type": "function", "function": {"name": n, "description": d, "parameters": self.schema()}}
                for n, d in self.tools]}
        return common | {"max_output_tokens": max_tokens, "instructions": "You change programs.", "store": False,
                         "input": list(self.items()), "tools": [{"type": "function", "name": n, "description": d,
                                                                 "parameters": self.schema()} for n, d in self.tools]}

    @staticmethod
    def schema():
        return {"type": "object", "properties": {"path": {"type": "string"}}}

    def messages(self):
        yield {"role": "user", "content": self.task}
        for answer, call, arguments, result, reminder in self.turns:
            said = [{"type": "text", "text": answer}] if answer else []
            yield {"role": "assistant", "content": said + [{"type": "tool_use", "id": call, "name": "read", "input": arguments}]}
            yield {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": result}]}
            if reminder:
                yield {"role": "system", "content": reminder}

    def chat(self):
        yield {"role": "system", "content": "You change programs."}
        yield {"role": "user", "content": self.task}
        for answer, call, arguments, result, reminder in self.turns:
            function = {"name": "read", "arguments": json.dumps(arguments)}
            yield {"role": "assistant", "content": answer or None,
                   "tool_calls": [{"id": call, "type": "function", "function": function}]}
            yield {"role": "tool", "tool_call_id": call, "content": result}
            if reminder:
                yield {"role": "system", "content": reminder}

    def items(self):
        yield {"role": "user", "content": self.task}
        for answer, call, arguments, result, reminder in self.turns:
            if answer:
                yield {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": answer}]}
            yield {"type": "function_call", "call_id": call, "name": "read", "arguments": json.dumps(arguments)}
            yield {"type": "function_call_output", "call_id": call, "output": result}
            if reminder:
                yield {"role": "developer", "content": reminder}


def answer_and_usage(api, a):
    """The text, the prompt's tokens, and how many of them the prefix cache had."""
    u = a["usage"]
    if api == "chat":
        return a["choices"][0]["message"]["content"], u["prompt_tokens"], u["prompt_tokens_details"]["cached_tokens"]
    if api == "messages":
        text = "".join(b["text"] for b in a["content"] if b["type"] == "text")
        return text, u["input_tokens"] + u["cache_read_input_tokens"], u["cache_read_input_tokens"]
    text = "".join(p["text"] for i in a["output"] if i["type"] == "message" for p in i["content"])
    return text, u["input_tokens"], u["input_tokens_details"]["cached_tokens"]


def run(server, api, model, turns, first, last, **fields):
    """Send all turns; the rows (prompt, new, cached, computed again)."""
    trace, rows, before, words = Trace(api, model), [], 0, 0
    for turn in range(turns):
        a = server.ask("POST", "/v1/" + ("chat/completions" if api == "chat" else api), json=trace.body(**fields))
        assert a.status_code == 200, a.text
        text, prompt, cached = answer_and_usage(api, a.json())
        again = max(before - cached, 0) if before else 0
        rows.append((prompt, prompt - before, cached, again))
        # the next result closes the gap to the line from `first` to `last`; the first ones tell tokens from words
        want = first + (last - first) * (turn + 1) / max(turns - 1, 1) - prompt
        a_word = (prompt - before) / words if words and turn > 1 else 2.0
        words = max(int((want - 30) / max(a_word, 0.5)), 1)
        trace.add(text, words)
        before = prompt
    return rows


def share_computed_again(rows):
    return sum(r[3] for r in rows) / sum(r[0] for r in rows)


def keep_layers(path, layers):
    """Leave the layers behind the first ones out of a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body, out = json.loads(data[8:8 + size]), data[8 + size:], b""
    for name, tensor in list(header.items()):
        layer = re.search(r"layers\.(\d+)\.", name)
        if layer and int(layer[1]) >= layers:
            del header[name]
        elif name != "__metadata__":
            begin, end = tensor["data_offsets"]
            tensor["data_offsets"] = [len(out), len(out) + end - begin]
            out += body[begin:end]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + out)


def give_template(path):
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def hybrid_with_template(directory, kind, length):
    import hybrid_model

    path = pathlib.Path(directory)
    hybrid_model.make(path, kind, length)
    give_template(path)
    return str(path)


def demo_with_template(directory, length=8192, layers=None):
    """The demo model with a template for tools, at a length that holds the turns; what it says there does not matter."""
    path = pathlib.Path(directory) / "demo"
    shutil.copytree(ROOT / "models" / "demo", path)
    give_template(path)
    shape = json.loads((path / "config.json").read_text())
    shape |= {"max_position_embeddings": length, "num_hidden_layers": layers or shape["num_hidden_layers"]}
    (path / "config.json").write_text(json.dumps(shape))
    if layers:
        keep_layers(path / "model.safetensors", layers)
    return str(path)


def main():
    from conftest import Server

    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--model", help="a model directory; default: the demo model with a template of its own")
    p.add_argument("--api", choices=("messages", "responses", "chat"), default="messages")
    p.add_argument("--turns", type=int, default=33)
    p.add_argument("--from", type=int, dest="first")
    p.add_argument("--to", type=int, dest="last")
    p.add_argument("--length", type=int, default=8192, help="of the demo model, or of the hybrid")
    p.add_argument("--hybrid", help="a kind of tests/http/hybrid_model.py, in place of the demo model")
    p.add_argument("--layers", type=int, help="of the demo model")
    p.add_argument("flags", nargs="*", help="of quire serve, behind --")
    o = p.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = o.model or (hybrid_with_template(directory, o.hybrid, o.length) if o.hybrid
                            else demo_with_template(directory, o.length, o.layers))
        s = Server(*o.flags, model=model)
        model = s.ask("GET", "/v1/models").json()["data"][0]
        last = o.last or int(model["max_model_len"] * 0.93)
        rows = run(s, o.api, model["id"], o.turns, o.first or int(last * 0.15), last)
        s.stop()
    print("prompt    new cached  again")
    for row in rows:
        print("%6d %6d %6d %6d" % row)
    print(f"computed again: {share_computed_again(rows):.2%} of {sum(r[0] for r in rows)} prompt tokens")


if __name__ == "__main__":
    main()
