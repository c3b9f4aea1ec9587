#!/usr/bin/env python3
"""Encoding speed of Quire's tokenizer and of Hugging Face tokenizers (Rust), one thread each, in turns.

    tokenizer_vs_hf.py DIR TEXT [--tool build/tests/bench/tokenizer] [--rounds 5]

Quire gets the text whole, tokenizers by paragraphs through encode_batch_fast, its fastest way (no offsets). The best
of the rounds counts. Prints one line of JSON.
"""
import argparse
import json
import os
import subprocess
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
from tokenizers import Tokenizer  # noqa: E402


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("dir")
    p.add_argument("text")
    p.add_argument("--tool", default="build/tests/bench/tokenizer")
    p.add_argument("--rounds", type=int, default=5)
    a = p.parse_args()
    with open(a.text, encoding="utf-8", newline="") as f:
        text = f.read()
    parts, size = text.split("\n\n"), len(text.encode())
    start = time.perf_counter()
    tok = Tokenizer.from_file(os.path.join(a.dir, "tokenizer.json"))
    load_hf = (time.perf_counter() - start) * 1000
    ours, theirs, decode = 0.0, 0.0, 1e9
    for _ in range(a.rounds):
        r = json.loads(subprocess.run([a.tool, "speed", a.dir, a.text], check=True, capture_output=True).stdout)
        ours, decode = max(ours, r["encode_mb_s"]), min(decode, r["decode_ns_token"])
        start = time.perf_counter()
        tok.encode_batch_fast(parts, add_special_tokens=False)
        theirs = max(theirs, size / (time.perf_counter() - start) / 1e6)
    load = json.loads(subprocess.run([a.tool, "load", a.dir], check=True, capture_output=True).stdout)["load_ms"]
    print(json.dumps(dict(dir=a.dir, quire_mb_s=ours, tokenizers_mb_s=round(theirs, 2), ratio=round(ours / theirs, 1), decode_ns_token=decode,
                          load_ms=load, tokenizers_load_ms=round(load_hf, 1))))


main()
