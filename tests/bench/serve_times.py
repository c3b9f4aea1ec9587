#!/usr/bin/env python3
"""Waiting times of a server's user: the start, and the first token of a long prompt that is cached.

    tests/bench/serve_times.py MODEL [--tokens 4096] [--rounds 3] [--quire build/quire] [-- options of quire serve]

Ready: from exec to the first `ready` of /health; the first start warms the page cache and does not count. Prefix
hit: time to first token of a prompt of random ids, cold and then again, in pairs of fresh prompts; the tokens found
in the cache are those of usage.prompt_tokens_details.
"""
import argparse
import http.client
import json
import random
import socket
import statistics
import subprocess
import time


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """A running server as a context manager; ready_s: seconds from its start to ready."""

    def __init__(self, args):
        self.args = args
        self.port = free_port()

    def __enter__(self):
        begun = time.monotonic()
        self.process = subprocess.Popen([self.args.quire, "serve", self.args.model, "--port", str(self.port), "--log-level",
                                         "warn", *self.args.options])
        while not self.ready():
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended with {self.process.returncode}")
            time.sleep(0.002)
        self.ready_s = time.monotonic() - begun
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def ready(self):
        try:
            c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1)
            c.request("GET", "/health")
            return c.getresponse().status == 200
        except OSError:
            return False

    def first_token(self, prompt):
        """Returns the seconds to the first event, and the number of tokens found in the cache."""
        c = http.client.HTTPConnection("127.0.0.1", self.port)
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True,
                "stream_options": {"include_usage": True}}
        begun = time.monotonic()
        c.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = c.getresponse()
        if answer.status != 200:
            raise SystemExit(answer.read().decode())
        first = None
        cached = 0
        for line in answer:
            if line.startswith(b"data: {"):
                first = first or time.monotonic() - begun
                usage = json.loads(line[6:]).get("usage") or {}
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", cached)
        return first, cached


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--quire", default="build/quire")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt; 0: only the start")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=1000, help="prompt ids are below this")
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    starts = []
    for i in range(args.rounds + 1):
        with Server(args) as server:
            starts += [server.ready_s] * (i > 0)
    print(f"ready after {statistics.median(starts) * 1e3:.0f} ms (median of {args.rounds}, least {min(starts) * 1e3:.0f})")
    if args.tokens == 0:
        return
    pairs = []
    with Server(args) as server:
        for _ in range(args.rounds):
            prompt = [random.randrange(3, args.vocab) for _ in range(args.tokens)]
            (cold, _), (hit, cached) = server.first_token(prompt), server.first_token(prompt)
            pairs.append((cold, hit))
            print(f"  {args.tokens} tokens: cold {cold * 1e3:.0f} ms, seen before {hit * 1e3:.1f} ms "
                  f"({cached} cached), {100 * hit / cold:.2f} %", flush=True)
    print(f"prefix hit: {100 * statistics.median(hit / cold for cold, hit in pairs):.2f} % of the cold time to first token")


if __name__ == "__main__":
    main()
