#!/usr/bin/env python3
"""Quire and llama.cpp on the same weights and threads, in turns, because a machine's speed varies between runs.

    LLAMA_CPP_BIN=/path/to/llama.cpp/build/bin tests/bench/llama_cpp.py MODEL_DIR MODEL.gguf [--rounds 5] [--threads 2]

MODEL_DIR is a Hugging Face directory, MODEL.gguf the same weights (llama.cpp's convert_hf_to_gguf.py --outtype
bf16). Each round measures everything once for both; the last line of each gives the medians, and the median of
the rounds' ratios. `best way` runs llama-bench with its weights copied into huge pages. Decode is also printed as
a fraction of the best read bandwidth of the run (build/tests/bench/bench_cpu read, before each pair), and with N
concurrent clients against `llama-server -np N`. Nothing else may run on the machine.
"""
import argparse
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request


def run(command, env=None):
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, check=False)
    if done.returncode != 0:
        sys.exit(f"{command[0]} ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


SETTLE_S = 2  # for Quire to move its weights into large pages
MOVED_BYTES_A_SECOND = 250e6  # at least, of the same, where a machine's host has yet to find the memory


def last_json(text):
    return json.loads([line for line in text.splitlines() if line.startswith("{")][-1])


class Bench:
    def __init__(self, args):
        self.args = args
        self.llama = os.environ.get("LLAMA_CPP_BIN") or sys.exit("set LLAMA_CPP_BIN to llama.cpp's build/bin")

    def llama_bench(self, prompt, generate, best=False):
        command = [f"{self.llama}/llama-bench", "-m", self.args.gguf, "-t", str(self.args.threads), "-p", str(prompt),
                   "-n", str(generate), "-r", "1", "-o", "json"]
        env = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if best else None
        return json.loads(run(command + (["-lm", "none"] if best else []), env))[0]["avg_ts"]

    def llama_batch(self, sequences, prompt, generate):
        text = run([f"{self.llama}/llama-batched-bench", "-m", self.args.gguf, "-t", str(self.args.threads), "-npp",
                    str(prompt), "-ntg", str(generate), "-npl", str(sequences), "-c",
                    str(sequences * (prompt + generate) + 512), "--output-format", "jsonl"])
        return last_json(text)["speed_tg"]

    def quire(self, requests, prompt, generate):
        return last_json(run([self.args.quire, "bench", "offline", self.args.model, "--device", "cpu", "--threads",
                              str(self.args.threads), "--requests", str(requests), "--input-len", str(prompt),
                              "--output-len", str(generate), "--settle", str(SETTLE_S), "--json", "-"]))

    def read_gbs(self):
        """The read bandwidth, measured now; bench_cpu is built by `make bench`."""
        text = run([f"{os.path.dirname(self.args.quire)}/tests/bench/bench_cpu", "read", "--threads", str(self.args.threads)])
        return float(re.search(r"four streams: ([0-9.]+) GB/s", text)[1])

    def model_bytes(self):
        if not os.path.isdir(self.args.model):
            return os.path.getsize(self.args.model)
        return sum(entry.stat().st_size for entry in os.scandir(self.args.model) if entry.name.endswith(".safetensors"))

    def decode_and_share(self, url=None):
        """Tokens a second, of a server if there is one, and the weight bytes read as a fraction of what could be read in that
        time: measured just before and just after. A tied embedding is read once, as the head."""
        read = self.read_gbs()
        rate = self.stream(url, 16, self.args.tokens)[0] if url else self.quire(1, 16, self.args.tokens)["decode_tok_s"]
        return rate, self.model_bytes() * rate / 1e9 / max(read, self.read_gbs())

    @contextlib.contextmanager
    def serving(self, command, env=None):
        """A server of either kind on a free port, healthy."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        server = subprocess.Popen(command + ["--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                  env={**os.environ, **(env or {})})
        try:
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                    break
                except OSError:
                    if server.poll() is not None:
                        sys.exit(f"{command[0]} ended with {server.returncode}")
                    time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait()

    @contextlib.contextmanager
    def settled(self, isa=None):
        """Quire's server with its weights in large pages; `isa`: on an instruction set of QUIRE_CPU_ISA."""
        ours = [self.args.quire, "serve", self.args.model, "--device", "cpu", "--threads", str(self.args.threads),
                "--log-level", "error"]
        with self.serving(ours, {"QUIRE_CPU_ISA": isa} if isa else None) as url:
            self.stream(url, 16, 8)
            time.sleep(1 + self.model_bytes() / MOVED_BYTES_A_SECOND)
            yield url

    def stream(self, url, prompt, generate):
        """One stream of `quire bench serve`: tokens a second of decode, of prefill."""
        with tempfile.NamedTemporaryFile("r") as out:
            run([self.args.quire, "bench", "serve", "--url", url, "--concurrency", "1", "--requests", "1", "--input-len",
                 str(prompt), "--output-len", str(generate), "--json", out.name])
            figures = last_json(out.read())
        decode_ms = figures["tpot_ms"]["mean"]
        return 1e3 / decode_ms if decode_ms > 0 else 0, 1e3 * prompt / figures["ttft_ms"]["mean"]

    def clients(self, url, requests, prompt, generate):
        """`quire bench serve` against a server: N clients at once."""
        with tempfile.NamedTemporaryFile("r") as out:
            run([self.args.quire, "bench", "serve", "--url", url, "--concurrency", str(self.args.clients), "--requests",
                 str(requests), "--input-len", str(prompt), "--output-len", str(generate), "--json", out.name])
            figures = last_json(out.read())
        return figures["output_tok_s"], figures["ttft_ms"]["max"]

    def client_pairs(self):
        """Bursts of N clients of 64 tokens in and out, in turns against both servers, of which one is idle."""
        threads = str(self.args.threads)
        theirs = [f"{self.llama}/llama-server", "-m", self.args.gguf, "-t", threads, "-np", str(self.args.clients), "-c", "4096"]
        ours = [self.args.quire, "serve", self.args.model, "--device", "cpu", "--threads", threads, "--log-level", "error"]
        n = self.args.clients
        with self.serving(theirs) as a, self.serving(ours) as b:
            for url in (a, b):
                self.clients(url, n, 8, 2)  # does not count
            time.sleep(SETTLE_S)
            for i in range(self.args.client_rounds or self.args.rounds):
                order = (a, b) if i % 2 == 0 else (b, a)
                pair = [self.clients(url, self.args.requests or n, 64, 64) for url in order]
                yield pair if i % 2 == 0 else pair[::-1]

    def figures(self):
        n = self.args.tokens
        yield "decode, one stream", lambda: self.llama_bench(0, n), lambda: self.quire(1, 16, n)["decode_tok_s"]
        yield ("decode, one stream, best way", lambda: self.llama_bench(0, n, best=True),
               lambda: self.quire(1, 16, n)["decode_tok_s"])
        yield "prefill of 512", lambda: self.llama_bench(512, 0), lambda: self.quire(1, 512, 2)["prefill_tok_s"]
        yield "decode, 16 at once", lambda: self.llama_batch(16, 64, 64), lambda: self.quire(16, 64, 64)["decode_tok_s"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("gguf")
    parser.add_argument("--quire", default="build/quire")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clients", type=int, default=16, help="at once, against the server; 0: none")
    parser.add_argument("--client-rounds", type=int, default=0, help="of clients; 0: as many as --rounds")
    parser.add_argument("--requests", type=int, default=0, help="of all clients together; 0: one per client")
    parser.add_argument("--tokens", type=int, default=128, help="generated tokens with one stream")
    args = parser.parse_args()
    if args.tokens < 32:
        parser.error("--tokens must be at least 32: quire bench leaves out the first and last steps")
    bench = Bench(args)
    shares = [bench.decode_and_share()[1] for _ in range(args.rounds)]
    print(f"decode, one stream: {100 * statistics.median(shares):.0f} % of the read bandwidth (best {100 * max(shares):.0f} %)",
          flush=True)
    for name, theirs, ours in bench.figures():
        pairs = []
        for i in range(args.rounds):
            pair = (theirs(), ours()) if i % 2 == 0 else (ours(), theirs())[::-1]
            pairs.append(pair)
            print(f"  {name}: llama.cpp {pair[0]:.2f}, quire {pair[1]:.2f} tokens/s, {pair[1] / pair[0]:.2f}", flush=True)
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"{name}: llama.cpp {statistics.median(a for a, _ in pairs):.2f}, "
              f"quire {statistics.median(b for _, b in pairs):.2f} tokens/s, ratio {ratio:.2f}", flush=True)
    if args.clients > 0:
        pairs = []
        for theirs, ours in bench.client_pairs():
            pairs.append((ours[0] / theirs[0], ours[1] / theirs[1]))
            print(f"  {args.clients} clients: llama-server {theirs[0]:.0f} tokens/s, worst TTFT {theirs[1]:.0f} ms; quire "
                  f"{ours[0]:.0f}, {ours[1]:.0f}", flush=True)
        total, ttft = (statistics.median(column) for column in zip(*pairs))
        print(f"{args.clients} clients, 64 in, 64 out: total ratio {total:.2f}, worst TTFT ratio {ttft:.2f}")


if __name__ == "__main__":
    main()
