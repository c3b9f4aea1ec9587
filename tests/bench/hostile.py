#!/usr/bin/env python3
"""What hostile bodies cost a server: the time to their answers, the memory it takes meanwhile,
and whether the tokens of another client's stream wait.

    tests/bench/hostile.py [MODEL] [--only TEXT] [--json FILE] [--quire build/quire]
                           [-- options of quire serve]

MODEL: the bundled one with a chat template that knows tools, if none is given. Each body is
sent over HTTP to a server that is running one stream of tokens; the table says the status,
the time from the last byte to the answer, how far the server's resident memory rose at its
highest above what it was (the body itself included), and the stream's longest time between
two events while the body was read, of which the first line gives the same without any body.
Refused: 400.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path[:0] = [os.path.join(ROOT, "tests", "http"), os.path.join(ROOT, "tests", "bench")]
import chat_models  # noqa: E402
import hostile_bodies  # noqa: E402
import serve_times  # noqa: E402

LATEST_MS, MOST_MIB = 50, 16

# ---- the server beside a stream ----


def stream(port, times, stop):
    """Keeps one stream running and notes when its events come, until told to stop."""
    while not stop.is_set():
        c = http.client.HTTPConnection("127.0.0.1", port)
        c.request(
            "POST",
            "/v1/completions",
            json.dumps({"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}),
            {"Content-Type": "application/json"},
        )
        answer = c.getresponse()
        seen = []
        for line in answer:
            if line.startswith(b"data: {"):
                seen.append(time.monotonic())
        times.put(seen)


class Watched(serve_times.Server):
    """A server with a stream that another process reads."""

    def __enter__(self):
        super().__enter__()
        self.times, self.stop, self.events = multiprocessing.Queue(), multiprocessing.Event(), []
        self.reader = multiprocessing.Process(
            target=stream, args=(self.port, self.times, self.stop)
        )
        self.reader.start()
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port)
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.reader.join()
        super().__exit__()

    def longest_gap(self, begin, end):
        """The stream's longest time between events that touches [begin, end], in seconds;
        between two streams none."""
        gaps = [0.0]
        while not self.events or not self.events[-1] or self.events[-1][-1] < end:
            self.events.append(self.times.get())
        for seen in self.events:
            gaps += [b - a for a, b in zip(seen, seen[1:]) if b > begin and a < end]
        self.events = self.events[-1:]
        return max(gaps)

    def memory(self, name):
        with open(f"/proc/{self.process.pid}/status") as f:
            return int(re.search(name + r":\s+(\d+)", f.read()).group(1)) / 1024

    def send(self, route, body):
        """Returns the status, seconds, MiB and what the answer says."""
        with open(f"/proc/{self.process.pid}/clear_refs", "w") as f:
            f.write("5")
        before = self.memory("VmRSS")
        self.connection.putrequest("POST", route)
        self.connection.putheader("Content-Type", "application/json")
        self.connection.putheader("Content-Length", str(len(body)))
        self.connection.endheaders()
        self.connection.send(body)
        begin = time.monotonic()
        answer = self.connection.getresponse()
        text = answer.read()
        took = time.monotonic() - begin
        try:
            error = json.loads(text).get("error")
            says = error["message"] if error else ""
        except (ValueError, KeyError):
            says = text.decode(errors="replace")
        return answer.status, took, self.memory("VmHWM") - before, says, begin, begin + took


def measure(args, model):
    rows = []
    args.model = model
    with Watched(args) as server:
        server.send("/v1/completions", b'{"prompt":"x","max_tokens":1,"guided_regex":"a"}')
        begin = time.monotonic()
        time.sleep(1)
        print(
            f"{'':60} {'bytes':>9} status {'ms':>7} {'MiB':>6} gap"
            f" {server.longest_gap(begin, begin + 1) * 1e3:5.1f} ms alone",
            flush=True,
        )
        for name, route, body in hostile_bodies.bodies():
            if args.only and args.only not in name:
                continue
            body = body.encode()
            status, took, mib, says, begin, end = server.send(route, body)
            gap = server.longest_gap(begin, end)
            over = "!" if took * 1e3 > LATEST_MS or mib > MOST_MIB else " "
            rows.append(
                {
                    "name": name,
                    "bytes": len(body),
                    "status": status,
                    "ms": round(took * 1e3, 1),
                    "mib": round(mib, 1),
                    "gap_ms": round(gap * 1e3, 1),
                    "says": says[:300],
                }
            )
            print(
                f"{name:60.60} {len(body):9} {status:6} {took * 1e3:7.1f} {mib:6.1f}"
                f" {gap * 1e3:6.1f}{over} {says[:args.width]}",
                flush=True,
            )
    return rows


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--quire", default="build/quire")
    parser.add_argument("--only", help="the bodies whose name has this text")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--width", type=int, default=60, help="of what an answer says")
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(
            args,
            args.model
            or chat_models.model_with(os.path.join(directory, "demo"), chat_models.HERMES),
        )
    refused = [r for r in rows if r["status"] != 200]
    over = [r["name"] for r in refused if r["ms"] > LATEST_MS or r["mib"] > MOST_MIB]
    print(
        f"{len(rows)} bodies, {len(refused)} refused, of them {len(over)} over {LATEST_MS} ms or"
        f" {MOST_MIB} MiB; longest gap of the stream"
        f" {max((r['gap_ms'] for r in rows), default=0)} ms"
    )
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
