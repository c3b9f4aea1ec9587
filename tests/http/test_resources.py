#!/usr/bin/env python3
"""The largest legal request of every route and field: the server's memory for it, and the
progress of other clients meanwhile.

    tests/http/test_resources.py --measure [--runs 5] [NAME ...]

prints figures: memory, descriptors, the worst gap of another client's stream.

The test does not measure time: another client's stream must go on (events are counted),
descriptors and memory must be released, and the peak of the server's resident memory
must stay below the limit in LIMITS. With sanitizers, which need memory of their own,
memory is not checked.
"""
import argparse
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time

import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from combo_run import Facts, Rig, is_sanitized  # noqa: E402
from combo_servers import plan_of, write_model  # noqa: E402
from conftest import PATIENCE_S, Server  # noqa: E402
from raw import Reader, post  # noqa: E402

MODEL = "null:1000"  # one step per millisecond; its tokens are bytes, its vocabulary 256
LENGTH, PROMPTS, CHOICES = 32768, 1024, 128
LETTERS = [
    32,
    *range(97, 123),
]  # matches anything the null model writes: a choice ends with its first token
ROUNDS = 8  # of a shape: memory that the allocator keeps is reused by the next one
STAYS_MIB = 16  # growth that may remain after the last one
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def ask(**fields):
    return {"prompt": "x", "max_tokens": 1, "seed": 1} | fields


def long_prompt(n):
    return [97 + i % 26 for i in range(n)]


class Shape:
    """One row of LIMITS: a largest request, sent `copies` times at once, whether its answers
    are read, and the MiB by which the server's resident memory may grow (`peak`)."""

    def __init__(self, name, route, body, peak, copies=1, read=True, fields=()):
        self.name, self.route, self.body, self.copies, self.read = name, route, body, copies, read
        self.peak, self.fields = peak, fields or (name,)

    def __repr__(self):
        return f"{self.route.rsplit('/', 1)[1]}-{self.name.replace(' ', '-')}"


LIMITS = [
    Shape("prompt", COMPLETIONS, lambda: ask(prompt="x" * (LENGTH - 8)), 8),
    Shape(
        "prompts", COMPLETIONS, lambda: ask(prompt=["x" * 1000] * PROMPTS), 64, fields=("prompt",)
    ),
    Shape(
        "prompts as ids",
        COMPLETIONS,
        lambda: ask(prompt=[long_prompt(1000)] * PROMPTS),
        96,
        fields=("prompt",),
    ),
    Shape(
        "choices",
        COMPLETIONS,
        lambda: ask(prompt=["x"] * 32, n=CHOICES, max_tokens=64, temperature=1),
        64,
        fields=("n", "max_tokens", "temperature"),
    ),
    Shape(
        "best_of",
        COMPLETIONS,
        lambda: ask(prompt=["x"] * 32, best_of=CHOICES, max_tokens=64, temperature=1),
        64,
    ),
    Shape(
        "echo",
        COMPLETIONS,
        lambda: ask(prompt=long_prompt(30000), n=CHOICES, temperature=1, echo=True, logprobs=20),
        192,
        fields=("echo", "logprobs"),
    ),
    Shape(
        "echo read as a stream",
        COMPLETIONS,
        lambda: ask(
            prompt=long_prompt(4000), n=16, temperature=1, echo=True, logprobs=20, stream=True
        ),
        128,
        fields=("echo", "stream"),
    ),
    Shape(
        "prompt_logprobs",
        COMPLETIONS,
        lambda: ask(prompt=long_prompt(30000), prompt_logprobs=20),
        128,
    ),
    Shape(
        "beams",
        COMPLETIONS,
        lambda: ask(
            use_beam_search=True, beam_width=CHOICES, n=CHOICES, max_tokens=1000, logprobs=20
        ),
        192,
        fields=("use_beam_search", "beam_width"),
    ),
    Shape(
        "penalties",
        COMPLETIONS,
        lambda: ask(
            prompt=["x"] * 64,
            n=64,
            temperature=1,
            max_tokens=300,
            presence_penalty=1,
            repetition_penalty=1.1,
        ),
        128,
        fields=("presence_penalty", "repetition_penalty", "frequency_penalty"),
    ),
    Shape(
        "stop",
        COMPLETIONS,
        lambda: ask(stop=["~" * 1023 + chr(48 + i) for i in range(16)], prompt=["x"] * PROMPTS),
        64,
    ),
    Shape(
        "stop_token_ids",
        COMPLETIONS,
        lambda: ask(stop_token_ids=[255] * 128, prompt=["x"] * PROMPTS),
        32,
    ),
    Shape(
        "bad_words",
        COMPLETIONS,
        lambda: ask(
            bad_words=["~" * 14 + chr(48 + i % 70) for i in range(128)], prompt=["x"] * PROMPTS
        ),
        64,
    ),
    Shape(
        "allowed_token_ids",
        COMPLETIONS,
        lambda: ask(allowed_token_ids=[97 + i % 26 for i in range(65536)], prompt=["x"] * PROMPTS),
        48,
    ),
    Shape(
        "logit_bias",
        COMPLETIONS,
        lambda: ask(logit_bias={str(i): 1 for i in range(256)}, prompt=["x"] * PROMPTS),
        48,
    ),
    Shape("user", COMPLETIONS, lambda: ask(user="u" * (7 << 20)), 40),
    Shape(
        "strings",
        COMPLETIONS,
        lambda: ask(
            cache_salt="s" * 256, request_id="r" * 128, suffix=""
        ),
        8,
        fields=("cache_salt", "request_id", "suffix", "model"),
    ),
    Shape(
        "unread answers",
        COMPLETIONS,
        lambda: ask(prompt=long_prompt(2000), n=16, temperature=1, echo=True, logprobs=20),
        256,
        copies=16,
        read=False,
        fields=("echo",),
    ),
    Shape(
        "unread streams",
        COMPLETIONS,
        lambda: ask(max_tokens=5000, stream=True, logprobs=20),
        256,
        copies=16,
        read=False,
        fields=("stream_options",),
    ),
    Shape(
        "waiting",
        COMPLETIONS,
        lambda: ask(
            prompt=["x"] * 64,
            n=64,
            temperature=1,
            max_tokens=8000,
            presence_penalty=1,
            stop_token_ids=LETTERS,
        ),
        # a group of 4,096 sequences, 2 KiB each, a copy; how many meet depends on the machine
        128,
        copies=12,
        fields=("n",),
    ),
    Shape(
        "messages",
        CHAT,
        lambda: {
            "messages": [{"role": "user", "content": "x"}] * 4096,
            "max_tokens": 1,
            "truncate_prompt_tokens": 900,
        },
        64,
        fields=("messages", "max_completion_tokens"),
    ),
    Shape(
        "message",
        CHAT,
        lambda: {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "x" * (7 << 20)}]}],
            "chat_template_kwargs": {"x": "y" * 1000},
            "max_tokens": 1,
            "truncate_prompt_tokens": 900,
        },
        256,
        fields=("messages", "chat_template_kwargs"),
    ),
    Shape(
        "tools",
        CHAT,
        lambda: {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": f"f{i}",
                        "description": "d" * 8000,
                        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
                    },
                }
                for i in range(512)
            ],
            "metadata": {"a": "m" * (1 << 20)},
            "prediction": {"type": "content", "content": "p" * (1 << 20)},
            "prompt_cache_key": "k" * (1 << 20),
            "prompt_cache_options": {"mode": "o" * (1 << 20)},
            "safety_identifier": "s" * 1000,
            "modalities": ["text"],
            "max_tokens": 1,
            "truncate_prompt_tokens": 900,
        },
        256,
        fields=(
            "tools",
            "tool_choice",
            "metadata",
            "prediction",
            "prompt_cache_key",
            "prompt_cache_options",
            "safety_identifier",
            "modalities",
        ),
    ),
    Shape(
        "functions",
        CHAT,
        lambda: {
            "messages": [{"role": "user", "content": "x"}],
            "functions": [{"name": f"f{i}", "description": "d" * 12000} for i in range(512)],
            "function_call": {"name": "f0"},
            "max_tokens": 1,
            "truncate_prompt_tokens": 900,
        },
        256,
        fields=("functions", "function_call"),
    ),
    Shape(
        "schema",
        COMPLETIONS,
        lambda: ask(
            response_format={
                "type": "json_schema",
                "json_schema": {"schema": {"enum": [f"{i:0200}" for i in range(3000)]}},
            },
            max_tokens=8,
        ),
        256,
        fields=("response_format", "guided_json", "structured_outputs"),
    ),
    Shape(
        "regex",
        COMPLETIONS,
        lambda: ask(guided_regex="(a|b{1,50}){1,50}" * 50, guided_decoding_backend="auto"),
        256,
        fields=("guided_regex", "guided_decoding_backend"),
    ),
    Shape(
        "grammar",
        COMPLETIONS,
        lambda: ask(guided_grammar="start: " + " | ".join(f'"{i:0100}"' for i in range(2000))),
        256,
        fields=("guided_grammar",),
    ),
    Shape(
        "choice",
        COMPLETIONS,
        lambda: ask(guided_choice=[f"{i:0200}" for i in range(2000)]),
        256,
        fields=("guided_choice",),
    ),
    Shape(
        "prompt",
        "/tokenize",
        lambda: {"prompt": "x y " * (7 << 18), "return_token_strs": True},
        256,
    ),
    Shape(
        "unread",
        "/tokenize",
        lambda: {"prompt": "x y " * (1 << 18), "return_token_strs": True},
        256,
        copies=16,
        read=False,
        fields=("prompt",),
    ),
    Shape("tokens", "/detokenize", lambda: {"tokens": long_prompt((1 << 20) - 16)}, 96),
]


# ---- another client's stream, in a process of its own ----


def be_victim(host, port, max_tokens):
    """Endless streams; for each input line it prints one line: events and the worst gap in ms
    since the previous line."""
    body = json.dumps(
        {"prompt": "v", "max_tokens": max_tokens, "ignore_eos": True, "seed": 2, "stream": True}
    ).encode()
    import select

    events, worst, sock, last = 0, 0.0, None, time.monotonic()
    while True:
        if sock is None:
            sock = socket.create_connection((host, port))
            sock.sendall(post(COMPLETIONS, body))
            tail, last = b"", time.monotonic()
        ready = select.select([sock, sys.stdin], [], [])[0]
        if sock in ready:
            data, now = sock.recv(1 << 16), time.monotonic()
            worst, last = max(worst, now - last), now
            events += (tail[-5:] + data).count(b"data:") - tail[-5:].count(b"data:")
            tail = (tail + data)[-20:]
            if not data or b"[DONE]" in tail:
                sock.close()
                sock = None
        if sys.stdin in ready:
            if not sys.stdin.readline():
                return
            worst = max(worst, time.monotonic() - last)
            print(events, round(worst * 1000, 1), flush=True)
            events, worst, last = 0, 0.0, time.monotonic()


class Victim:
    def __init__(self, server, max_tokens):
        self.process = subprocess.Popen(
            [
                sys.executable,
                os.path.abspath(__file__),
                "--victim",
                server.host,
                str(server.port),
                str(max_tokens),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        events = 0
        while events < 3:
            time.sleep(0.02)
            events += self.take()[0]

    def take(self):
        """(events, worst gap in ms) since the last call."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        events, gap = self.process.stdout.readline().split()
        return int(events), float(gap)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


# ---- the server, from outside ----


def memory_mib(server, what):
    with open(f"/proc/{server.process.pid}/status") as f:
        return int(re.search(rf"{what}:\s+(\d+)", f.read())[1]) / 1024


def forget_peak(server):
    with open(f"/proc/{server.process.pid}/clear_refs", "w") as f:
        f.write("5")


def descriptors(server):
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def idle_descriptors(server, at_most):
    """The number of open descriptors once those of ended connections are closed."""
    end = time.monotonic() + PATIENCE_S
    while descriptors(server) > at_most and time.monotonic() < end:
        time.sleep(0.02)
    return descriptors(server)


class Figures:
    """The measurements of one shape."""

    def __init__(self):
        (
            self.status,
            self.seconds,
            self.events,
            self.gap_ms,
            self.peak,
            self.after,
            self.descriptors,
        ) = (set(), 0, 0, 0, 0, 0, 0)

    def __str__(self):
        return (
            f"{'/'.join(map(str, sorted(self.status))):>9} {self.seconds:7.2f} s  "
            f"peak {self.peak:7.1f} MiB  after {self.after:6.1f} MiB  "
            f"descriptors {self.descriptors:+d}  victim {self.events:6d} events, worst gap "
            f"{self.gap_ms:8.1f} ms"
        )


def read_status(sock):
    """Reads one answer to its end; returns the status."""
    reader = Reader(sock)
    status, headers = reader.head()
    left = int(headers.get("content-length", 0)) - len(reader.buffer)
    tail = reader.buffer
    chunked = headers.get("transfer-encoding") == "chunked"
    while left > 0 or (chunked and not tail.endswith(b"\r\n0\r\n\r\n")):
        data = sock.recv(1 << 20)
        assert data, "the connection ended inside an answer"
        left, tail = left - len(data), (tail[-8:] + data)[-8:]
    return status


def wait_made(server):
    """Wait until everything but the other client's stream is generated: what was not read is
    held now."""
    server.wait_metric("num_requests_waiting", 0)
    end = time.monotonic() + PATIENCE_S
    while server.metric("num_requests_running") > 1 and time.monotonic() < end:
        time.sleep(0.05)


def play(server, shape, victim):
    """One shape, once."""
    data, figures = post(shape.route, json.dumps(shape.body()).encode()), Figures()
    before, files = memory_mib(server, "VmRSS"), descriptors(server)
    forget_peak(server)
    victim.take()
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        socks = []
        for _ in range(shape.copies):
            sock = stack.enter_context(socket.socket())
            if not shape.read:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(PATIENCE_S)
            sock.connect((server.host, server.port))
            sock.sendall(data)
            socks.append(sock)
        if shape.read:
            figures.status = {read_status(s) for s in socks}
        else:
            wait_made(server)
        figures.seconds = time.monotonic() - began
        figures.events, figures.gap_ms = victim.take()
        figures.peak = memory_mib(server, "VmHWM") - before
    figures.descriptors = idle_descriptors(server, files) - files
    server.wait_metric("http_streams", 1)  # the victim's
    figures.after = memory_mib(server, "VmRSS") - before
    return figures


def judge(shape, figures, again=False):
    """The limits that are exceeded, as text, or "". `again`: it is not the first round."""
    wrong = []
    if not figures.status <= {200, 400, 429, 503}:
        wrong.append(f"answered {figures.status}")
    if figures.descriptors > 0:
        wrong.append(f"{figures.descriptors} descriptors are left open")
    # The engine makes a thousand steps per second. Two events per second show that
    # a stream goes on, on any machine.
    if figures.events < 2 * figures.seconds - 10:
        wrong.append(f"another stream got {figures.events} events in {figures.seconds:.1f} s")
    if not is_sanitized():
        if figures.peak > shape.peak:
            wrong.append(f"{figures.peak:.0f} MiB are held, more than {shape.peak}")
        if again and figures.after > STAYS_MIB:
            wrong.append(f"{figures.after:.0f} MiB stay, more than {STAYS_MIB}")
    return "; ".join(wrong)


@contextlib.contextmanager
def served(route):
    """A server for a route; chats use the bundled model, because they need a template."""
    rig = Rig("swap")
    flags = ["--access-log", "none", "--http-threads", "2"]
    if route == CHAT:
        flags += ["--device", "cpu", "--threads", "1", "--kv-cache-memory", "64MiB"]
    server = Server(*flags, model=write_model(plan_of("swap"), rig.folder) if route == CHAT else MODEL)
    victim = None
    try:
        victim = Victim(server, 900 if route == CHAT else 30000)
        yield server, victim
    finally:
        if victim:
            victim.close()
        server.process.kill()
        server.process.wait()
        rig.remove()


@pytest.mark.parametrize("shape", LIMITS, ids=repr)
def test_largest_request(shape):
    with served(shape.route) as (server, victim):
        play(server, Shape("warm", shape.route, lambda: {"prompt": "x"}, 0), victim)
        first = judge(shape, play(server, shape, victim))
        assert not first, first
        for _ in range(ROUNDS):
            wrong = judge(shape, play(server, shape, victim), again=True)
            if not wrong:
                break
        assert not wrong, f"after {ROUNDS} rounds: {wrong}"


def is_large(schema):
    """Whether a field's size is not bounded by its type."""
    if any(k in schema for k in ("anyOf", "oneOf", "allOf")):
        return any(is_large(s) for k in ("anyOf", "oneOf", "allOf") for s in schema.get(k, ()))
    return (
        schema.get("type") in ("string", "array", "object")
        and "const" not in schema
        and "enum" not in schema
    )


def test_every_field_that_may_be_large_has_a_row(server):
    facts = Facts(None)
    facts.read_openapi(server.ask("GET", "/openapi.json").json())
    judged = {}
    for shape in LIMITS:
        judged.setdefault(shape.route, set()).update(shape.fields)
    judged[CHAT] |= judged[COMPLETIONS]
    for route, schema in facts.schemas.items():
        large = {
            name
            for name, rule in schema["properties"].items()
            if is_large(rule) and name != "model"
        }
        assert large <= judged.get(route, set()), f"{route}: {large - judged.get(route, set())}"


def measure(names, runs):
    """The figures of each shape: the median of the worst gaps, and the maximum of everything
    else."""
    for shape in LIMITS:
        if names and not any(n in repr(shape) for n in names):
            continue
        with served(shape.route) as (server, victim):
            all_figures = [play(server, shape, victim) for _ in range(runs)]
        total = Figures()
        total.gap_ms = sorted(f.gap_ms for f in all_figures)[runs // 2]
        for name in ("seconds", "events", "peak", "after", "descriptors"):
            setattr(total, name, max(getattr(f, name) for f in all_figures))
        total.status = set().union(*(f.status for f in all_figures))
        print(f"{shape!r:40} {total}  limit {shape.peak} MiB  {judge(shape, total)}", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    p.add_argument("--measure", action="store_true", help="print figures")
    p.add_argument("--runs", type=int, default=5)
    p.add_argument("--victim", nargs=3, help=argparse.SUPPRESS)
    p.add_argument("names", nargs="*")
    options = p.parse_args()
    if options.victim:
        be_victim(options.victim[0], int(options.victim[1]), int(options.victim[2]))
    else:
        measure(options.names, options.runs)


if __name__ == "__main__":
    main()
