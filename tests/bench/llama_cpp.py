#!/usr/bin/env python3
"""Quire beside llama.cpp on the same weights and threads, in turns, because a machine's speed moves from run to run.

    LLAMA_CPP_BIN=/path/to/llama.cpp/build/bin tests/bench/llama_cpp.py MODEL_DIR MODEL.gguf [--rounds 5] [--threads 2]

MODEL_DIR is a Hugging Face directory, MODEL.gguf the same weights (llama.cpp's convert_hf_to_gguf.py --outtype bf16).
Each round runs every figure once for both; the line at the end gives the medians and the median of the rounds' ratios.
`best way` runs llama-bench with its weights copied into huge pages. Nothing else may run on the machine.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys


def run(command, env=None):
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, check=False)
    if done.returncode != 0:
        sys.exit(f"{command[0]} ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


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
                              "--output-len", str(generate), "--json", "-"]))

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
    parser.add_argument("--tokens", type=int, default=128, help="generated tokens of the one-stream figures")
    args = parser.parse_args()
    if args.tokens < 32:
        parser.error("--tokens must be at least 32: quire bench leaves out the first and last steps")
    bench = Bench(args)
    for name, theirs, ours in bench.figures():
        pairs = []
        for i in range(args.rounds):
            pair = (theirs(), ours()) if i % 2 == 0 else (ours(), theirs())[::-1]
            pairs.append(pair)
            print(f"  {name}: llama.cpp {pair[0]:.2f}, quire {pair[1]:.2f} tokens/s, {pair[1] / pair[0]:.2f}", flush=True)
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"{name}: llama.cpp {statistics.median(a for a, _ in pairs):.2f}, "
              f"quire {statistics.median(b for _, b in pairs):.2f} tokens/s, ratio {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
