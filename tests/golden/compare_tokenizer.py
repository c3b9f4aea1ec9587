#!/usr/bin/env python3
"""Compare Quire's tokenizer with Hugging Face tokenizers on random and hard strings.

    compare_tokenizer.py DIR [--reference DIR] [--count 100000] [--seed 1] [--tool build/tests/bench/tokenizer]

For every string: the ids (with what the post-processor adds), the text they decode to with and without special tokens, and that
streamed decoding gives the same as decoding at once. The first differences are printed; exits 1 when there is one.
"""
import argparse
import os
import random
import struct
import subprocess
import sys
import threading
import unicodedata

from tokenizers import Tokenizer

WORDS = """the of and to in is was he for it with as his on be at by I this had not are but from or have an they which one you were her all she
there would their we him been has when who will more no if out so said what up its about into than them can only other new some could
time these two may then do first any my now such like our over man me even most made after also did many before must through back years
don't can't it's I'm you've we'll they'd DON'T It'S naïve café Straße Ελληνικά Привет мир 你好世界 こんにちは 안녕하세요 مرحبا שלום हिन्दी ไทย 🙂 👨‍👩‍👧‍👦 🇫🇷 e\u0301 Å ﬁ ½ ² ① Ⅷ ａｂｃ
3.14159 1,000,000 2026-11-21 foo_bar(x) <div> </div> https://example.org/a?b=c&d=e user@example.org #include <stdio.h> \t\tif x: \r\n""".split(" ")
SPACES = [" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n", "\n ", "\u00a0", "\u2003", "\u3000", "\u2028", "\u0085", "\x0b", "\u200b", "\u180e", "\ufeff", " " * 17, "\u1680"]
# Unicode 14, which every library here knows; newer characters have other classes in older tables.
ASSIGNED = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000 and unicodedata.category(chr(c)) != "Cn"]
RANGES = [(0x20, 0x7F), (0x00, 0x20), (0x80, 0x250), (0x300, 0x370), (0x370, 0x530), (0x590, 0x700), (0x900, 0xE80), (0x1100, 0x1200), (0x1E00, 0x2000),
          (0x2000, 0x2070), (0x2070, 0x2200), (0x3000, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0xFB00, 0xFE00), (0xFF00, 0xFFF0), (0x1F300, 0x1F700), (0xE000, 0xE100)]


def one_char(r):
    while True:
        lo, hi = r.choice(RANGES)
        c = chr(r.randrange(lo, hi)) if r.random() < 0.9 else chr(r.choice(ASSIGNED))
        if unicodedata.category(c) != "Cn":
            return c


def one_text(r, special):
    kind = r.randrange(8)
    if kind == 0:
        return "".join(one_char(r) for _ in range(r.randrange(0, 40)))
    if kind == 1:
        return r.choice(SPACES).join(r.choice(WORDS) for _ in range(r.randrange(0, 30)))
    if kind == 2:
        return "".join(r.choice(WORDS) + r.choice(SPACES) for _ in range(r.randrange(0, 20)))
    if kind == 3:
        return "".join(r.choice([one_char(r), r.choice(SPACES), r.choice(WORDS)]) for _ in range(r.randrange(0, 30)))
    if kind == 4:
        return one_char(r) * r.randrange(1, 200)
    if kind == 5:
        return "".join(r.choice(special + SPACES + WORDS[:30]) for _ in range(r.randrange(1, 12))) if special else r.choice(WORDS)
    if kind == 6:
        return "".join(chr(r.randrange(0x20, 0x7F)) for _ in range(r.randrange(0, 60)))
    return "".join(r.choice(["'s", "'S", "'ll", "'LL", "'\u017f", "'re", "n't", "'", "\"", "a", "B", "1", "12345", " ", "\n", ".", "!!", "é", "\u0301", "\u212a", "Ⅳ"]) for _ in range(r.randrange(0, 25)))


class Tool:
    def __init__(self, tool, directory):
        self.p = subprocess.Popen([tool, "ids", directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def feed(self, texts):
        for t in texts:
            b = t.encode()
            self.p.stdin.write(struct.pack("<I", len(b)) + b)
        self.p.stdin.flush()

    def frame(self):
        head = self.p.stdout.read(4)
        if len(head) < 4:
            sys.exit("the tool ended early")
        return self.p.stdout.read(struct.unpack("<I", head)[0])

    def answer(self):
        code = struct.unpack("<i", self.frame())[0]
        ids = list(memoryview(self.frame()).cast("i"))
        return code, ids, self.frame().decode(), self.frame().decode(), self.frame().decode()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("dir")
    p.add_argument("--reference", help="a directory with the reference tokenizer.json, if DIR has none")
    p.add_argument("--count", type=int, default=100000)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--tool", default="build/tests/bench/tokenizer")
    a = p.parse_args()
    tok = Tokenizer.from_file(os.path.join(a.reference or a.dir, "tokenizer.json"))
    special = [t.content for t in tok.get_added_tokens_decoder().values()][:20]
    fallback = "ByteFallback" in (tok.decoder.__getstate__().decode() if tok.decoder else "")
    r, tool, bad, done = random.Random(a.seed), Tool(a.tool, a.dir), 0, 0
    while done < a.count and bad < 10:
        texts = [one_text(r, special) for _ in range(min(1000, a.count - done))]
        threading.Thread(target=tool.feed, args=(texts,), daemon=True).start()
        for text, enc in zip(texts, tok.encode_batch(texts)):
            code, ids, all_text, plain, streamed = tool.answer()
            want = (0, enc.ids, tok.decode(enc.ids, skip_special_tokens=False), tok.decode(enc.ids))
            got = (code, ids, all_text, plain)
            if got != want or (streamed != all_text and not (fallback and "\ufffd" in all_text)):
                bad += 1
                print(f"text {text!r}\n  want {want}\n  got  {got}\n  streamed {streamed!r}")
        done += len(texts)
    print(f"{a.dir}: {done} strings, {bad} differences")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
