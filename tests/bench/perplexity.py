#!/usr/bin/env python3
"""Perplexity of a text by a running server and by transformers, over the same weights.

    build/quire serve --model models/cache/smollm2 &
    tests/bench/perplexity.py --url http://127.0.0.1:8000 --model models/cache/smollm2 --tokens 65536 FILE...

The text is cut into windows of --window tokens, each scored on its own: by prompt log-probabilities of the server,
and in float32 over the stored weights by transformers. Prints both perplexities and their ratio. Needs torch and
transformers.
"""
import argparse
import json
import math
import urllib.request

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def served(url, ids):
    """The sum of the log-probabilities of ids[1:]."""
    body = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        values = json.load(answer)["choices"][0]["logprobs"]["token_logprobs"]
    assert len(values) == len(ids) and values[0] is None
    return sum(values[1:])


@torch.no_grad()
def reference(model, ids):
    ids = torch.tensor([ids])
    logprobs = torch.log_softmax(model(ids).logits[0, :-1].double(), -1)
    return logprobs.gather(1, ids[0, 1:, None]).sum().item()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--url", default="http://127.0.0.1:8000")
    p.add_argument("--model", required=True, metavar="DIR")
    p.add_argument("--tokens", type=int, default=65536)
    p.add_argument("--window", type=int, default=1024)
    p.add_argument("file", nargs="+")
    a = p.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(a.model)
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32).eval()
    text = "\n".join(open(f, encoding="utf-8").read() for f in a.file)
    ids = tokenizer(text).input_ids[:a.tokens]
    ours = theirs = n = 0
    for at in range(0, len(ids) - 1, a.window):
        part = ids[at:at + a.window]
        if len(part) < 2:
            break
        ours -= served(a.url, part)
        theirs -= reference(model, part)
        n += len(part) - 1
    print("%d tokens: perplexity %.5f, transformers %.5f, ratio %.6f" %
          (n, math.exp(ours / n), math.exp(theirs / n), math.exp((ours - theirs) / n)))


if __name__ == "__main__":
    main()
