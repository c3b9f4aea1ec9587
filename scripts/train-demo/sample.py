#!/usr/bin/env python3
"""Sample training text from SmolLM2: one JSON line a text, {"text", "ended"}; FILE.done appears at the end.

    sample.py --teacher DIR|FILE.gguf --tokenizer TOKENIZER.json --out FILE [--seconds 170] [--batch 8192]
"""
import argparse
import json
import multiprocessing
import os
import re
import time
import zlib

import torch
from tokenizers import Tokenizer

from prompts import prompts
from teacher import Teacher

TURN = "<|im_start|>system\nYou write in plain, simple English.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}"
UNWANTED = re.compile(r"[^\x20-\x7E\n]|[*#_<>\[\]{}|\\=+~^`@]|https?:|\b(AI|language model|SmolLM|Sure|Certainly|sentences?:|paragraph|the story|this story)\b|\d\.\s|\n\s*-|:\n")


def clean(job):
    """job: (text, ended). The text as training wants it, or None. A text that was cut off ends after its last whole sentence."""
    text, ended = job
    text = re.sub(r" +\n", "\n", text.strip())
    text = re.sub(r"\n{2,}", "\n\n", text)
    if UNWANTED.search(text):
        return None
    if not ended:
        end = max(text.rfind(m) for m in (". ", "! ", "? ", ".\" ", ".\n", "!\n", "?\n", ".\"\n", "!\" ", "?\" "))
        if end < 120:
            return None
        text = text[:end + 2].rstrip()
    if len(text) < 30 or text[-1] not in ".!?\"":
        return None
    words = re.findall(r"[a-z']+", text.lower())
    grams = list(zip(words, words[1:], words[2:], words[3:]))
    if len(grams) < 4 or len(set(grams)) < 0.93 * len(grams):
        return None
    if len(text) > 300 and len(zlib.compress(text.encode())) < 0.42 * len(text):
        return None
    return text, ended


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--teacher", required=True)
    p.add_argument("--tokenizer", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--seconds", type=float, default=170, help="start no wave of prompts after this long")
    p.add_argument("--batch", type=int, default=8192)
    p.add_argument("--max-new", type=int, default=160)
    p.add_argument("--temperature", type=float, default=0.7)
    p.add_argument("--min-p", type=float, default=0.08)
    p.add_argument("--penalty", type=float, default=0.25)
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(a.seed)
    pool = multiprocessing.get_context("fork").Pool(max(1, os.cpu_count() - 3))  # before the device is touched
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan anew for every length
    start = time.time()
    teacher = Teacher(a.teacher, device, torch.bfloat16)
    tok = Tokenizer.from_file(a.tokenizer)
    eos = tok.token_to_id("<|im_end|>")
    banned = torch.tensor([i for i in range(tok.get_vocab_size()) if i < 17 and i != eos], device=device)
    print(f"teacher ready after {time.time() - start:.1f} s on {device}", flush=True)
    source, waiting, cleaning = prompts(a.seed), {}, []
    n_made, n_kept, n_chars, wave = 0, 0, 0, 0

    def collect(out, all_of_them):
        nonlocal n_kept, n_chars
        while cleaning and (all_of_them or cleaning[0].ready()):
            for text, ended in filter(None, cleaning.pop(0).get()):
                n_kept += 1
                n_chars += len(text)
                out.write(json.dumps({"text": text, "ended": ended}) + "\n")

    with open(a.out, "w") as out:
        while time.time() - start < a.seconds:
            # Prompts of one length make a wave; the first length with a full batch goes.
            while True:
                asks = [next(source) for _ in range(2048)]
                for (ask, opening), enc in zip(asks, tok.encode_batch([TURN.format(*x) for x in asks])):
                    waiting.setdefault(len(enc.ids), []).append((ask, opening, enc.ids))
                full = max(waiting, key=lambda n: len(waiting[n]))
                if len(waiting[full]) >= a.batch:
                    break
            batch, waiting[full] = waiting[full][:a.batch], waiting[full][a.batch:]
            ids = torch.tensor([b[2] for b in batch])
            t0, made = time.time(), 0
            for rows in teacher.sample(ids, a.max_new, eos, a.temperature, a.min_p, a.penalty, banned):
                cut = [(r, x[:x.index(eos)] if ended else x, ended) for r, x, ended in rows]
                made += sum(len(x) for _, x, _ in cut)
                texts = tok.decode_batch([x for _, x, _ in cut])
                cleaning.append(pool.map_async(clean, [(batch[r][1] + text, ended) for (r, _, ended), text in zip(cut, texts)]))
                collect(out, False)
            n_made += len(batch)
            wave += 1
            print(f"wave {wave}: {time.time() - t0:.1f} s, {made / (time.time() - t0):.0f} tokens/s; kept {n_kept} of {n_made} texts, "
                  f"{n_chars / 1e6:.1f} MB, after {time.time() - start:.0f} s", flush=True)
        collect(out, True)
    print(f"kept {n_kept} texts, {n_chars / 1e6:.1f} MB", flush=True)
    open(a.out + ".done", "w").close()
    pool.terminate()


if __name__ == "__main__":
    main()
