#!/usr/bin/env python3
"""What quantised weights of a model make of a text, by Quire and by the weights'
reference decoders in float32.

    tests/bench/quantised.py perplexity|greedy|all --model DIR --work DIR
        [--text FILE... | --sampled] [--cases CASE...] [--gguf FILE...]
        [--gguf-source FILE [--ggml LIB]] [--llama-cpp BIN] [--out FILE [--resume]]

DIR is a model of floats of LLaMA's architecture (scripts/fetch-model smollm2). A case
is a directory that scripts/make-quantised-goldens knows to write (`ct-int4-g32`,
`gptq`, ...), what `quire quantize` writes (`quire-int4`,
`quire-int8-static-asymmetric`), weights quantised at load (`online-fp8`), or a GGUF
file. Weights are decoded by compressed-tensors, the package gguf, or the formulas that
the formats' authors publish, and run by transformers in float32.

The text is the decision pages of this project as they were at the commit PAGES_AT, which
are read from git's history (a shallow clone fetches it first), so that figures of two
versions are of the same tokens: `TEXT` for what is judged, and `CALIBRATION`, pages
apart, for `quire-...-static` and `-search`. --sampled: texts of the model itself, with a
fixed seed.

perplexity: --tokens of the text in windows of 512, each alone. A line of JSON a case:
  source       perplexity of the model of floats
  reference    of the decoded weights in float32
  quire        of the same file by Quire, on this processor; ratio: to the reference
  rounded      of the decoded weights with the inputs of products rounded to int8 in
               groups of 32 where Quire's kernels do so on a CPU: of W8A8 and of GGUF
               files, but for q, k, v and the layers at the ends; of files with a scale
               for all inputs of a product by that
  kl           mean of KL(reference || quire) over the second halves of the first two
               windows, in nats; kl_rounded of `rounded`
  llama_cpp    the same by llama.cpp (--llama-cpp: the folder of llama-perplexity and
               llama-quantize), for GGUF files
  met          of files that quantise weights alone: the ratio is within 0.1 %; of GGUF
               files: kl is at most llama_cpp; of W8A8, whose inputs the file has
               rounded: kl is at most 1.1 times kl_rounded. Not there without a bar
What the references said is kept in --work, by the weights and tokens it was made of, and
shared by cases whose weights are equal.
all: both of every case, one case after another, those that most files have first, and of
the source's GGUF file in every other type: one command for a whole record, which --resume
goes on with where an earlier one ended:

    tests/bench/quantised.py all --model DIR --work DIR --gguf-source FILE --ggml LIB
        --llama-cpp DIR --out FILE --resume

greedy: --prompts of the text, 32 tokens each, are continued greedily by --new tokens; a
prompt holds if each of its tokens is within --tie nats of the reference's best one,
given what stands before it. Where a file has a scale for all inputs of a product, the
reference rounds them by it. held_bfloat16, with --bfloat16: the same of the decoded
weights run in bfloat16 by transformers.

Needs build/tests/bench/logits, build/quire, torch, transformers, compressed-tensors and gguf.
"""
import argparse
import contextlib
import copy
import fnmatch
import hashlib
import importlib.machinery
import importlib.util
import json
import math
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
WINDOW = 512
KL_WINDOWS = 2  # of which whole distributions are compared
RATIO_BAR, KL_OF_ROUNDED = 1e-3, 1.1
TOKENS, GGUF_TOKENS = 1024, 2048
PAGES_AT = "ca2ca008de291be3420d7cb00ac9c431c6ded854"
TEXT = "docs/decisions/00[0-2]*.md"
CALIBRATION = "docs/decisions/00[45]*.md"


def pages(pattern):
    """The pages of the pattern at PAGES_AT, in the order of their names."""
    git = lambda *args: subprocess.run(["git", "-C", ROOT, *args], check=True, text=True,
                                       stdout=subprocess.PIPE, encoding="utf-8").stdout
    names = git("ls-tree", "-r", "--name-only", PAGES_AT, "docs/decisions/").splitlines()
    found = [name for name in sorted(names) if fnmatch.fnmatch(name, pattern)]
    return "\n".join(git("show", PAGES_AT + ":" + name) for name in found)


def script(name):
    module_name = name.replace("-", "_").replace(".py", "")
    loader = importlib.machinery.SourceFileLoader(module_name, str(ROOT / "scripts" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


sys.path.insert(0, str(ROOT / "scripts"))
goldens = script("make-quantised-goldens")
by_one = goldens.grouped


def grouped(x, rows, cols, f):
    """The goldens' of weights that whole groups make up, all groups at once."""
    rows, cols = rows or x.shape[0], cols or x.shape[1]
    if x.shape[0] % rows or x.shape[1] % cols:
        return by_one(x, rows, cols, f)
    blocks = x.reshape(x.shape[0] // rows, rows, -1, cols).permute(0, 2, 1, 3)
    return torch.vmap(f)(blocks.reshape(-1, rows * cols)).reshape(blocks.shape[:2])


goldens.grouped = grouped
goldens.STATIC_SCALE = 1.0  # of the whole model, whose inputs reach further than a tiny one's
to_hf = script("gguf_to_hf.py")


def linear_names(model):
    modules = model.named_modules()
    return [path + ".weight" for path, m in modules if isinstance(m, torch.nn.Linear)
            and path != "lm_head"]


# ---- cases: a file, and the values that its own decoder gives the weights ----

# The formats whose inputs Quire rounds on a CPU: W8A8, and blocks of GGUF.
ROUNDED = ("fp8", "quire-int8", "ct-int8-channel", "ct-int8-tensor", "ct-int8-asymmetric", ".gguf")
ALONE = ("-weights",)  # of these the weights alone are quantised, whatever the names above
TOKEN = goldens.TOKEN
ct, w = goldens.ct_case, goldens.weights
CASES = {name: case for name, case in goldens.CASES.items()
         if name not in ("mxfp4-experts", "ct-int4-head")}
CASES.update({
    "ct-int4-g64": ct("pack-quantized", w(4, "group", group_size=64)),
    "ct-int4-g64-asymmetric": ct("pack-quantized", w(4, "group", False, group_size=64)),
    "ct-int4-act-order": (*ct("pack-quantized", w(4, "group", group_size=32))[:2],
                          lambda n, x: ct_act_order(n, x, 32)),
    "ct-int8-tensor": ct("int-quantized", w(8, "tensor"), TOKEN),
    "fp8-blocks-64": ({}, {"quant_method": "fp8", "activation_scheme": "dynamic",
                           "weight_block_size": [64, 64]},
                      lambda n, x: fp8_blocks(x, 64)),
    "ct-fp8-weights": ct("float-quantized", w(8, "channel", kind="float"),
                         scale_type=torch.float32),
    "ct-int8-weights": ct("int-quantized", w(8, "channel"), scale_type=torch.float32),
    "gptq-g64-sym": ({}, {**goldens.GPTQ, "sym": True, "group_size": 64},
                     lambda n, x: goldens.gptq(n, x, group=64, symmetric=True)),
})
# In this order unless --cases says otherwise: a file of each kind, then their variants.
CASES_DEFAULT = [
    "ct-fp8-channel", "ct-int8-channel", "gptq", "awq", "ct-int4-g32", "ct-nvfp4", "quire-mxfp4",
    "online-fp8", "online-int8", "online-int4", "quire-fp8-static", "quire-int8-static",
    "modelopt-fp8", "modelopt-nvfp4", "fp8-blocks-128", "fp8-tensor", "ct-int4-g32-asymmetric",
    "ct-int4-g128", "gptq-act-order", "gptq-int8", "gptq-v2-sym", "ct-int8-asymmetric",
    "ct-fp8-weights", "ct-int8-weights", "ct-int8-packed", "online-mxfp4", "online-int8-g128",
    "online-int8-asymmetric", "online-int8-g128-asymmetric", "quire-fp8", "quire-int8",
    "quire-int4", "quire-nvfp4", "quire-int8-asymmetric", "quire-int4-asymmetric", "quire-int4-asymmetric-search",
    "ct-fp8-tensor", "ct-fp8-block", "ct-int8-tensor", "ct-int4-channel", "ct-int4-act-order",
    "ct-int4-g64", "ct-int4-g64-asymmetric", "fp8-blocks", "fp8-blocks-64", "gptq-g64-sym",
]
GGUF_FIRST = ("Q4_K_M", "Q8_0", "Q4_0", "Q6_K", "IQ4_XS", "Q4_K", "Q5_K", "Q3_K", "Q2_K")


def fp8_blocks(x, n):
    codes, s, exact = goldens.fp8_scaled(x, n, n)
    return {"weight": codes, "weight_scale_inv": s}, exact


def ct_act_order(name, x, group):
    """Groups of columns that are no neighbours, each with a scale of its own values."""
    args = w(4, "group", group_size=group)
    where = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(len(name)))
    back = torch.argsort(where)
    stored, exact = goldens.compressed(name, x[:, where], "pack-quantized", args)
    scale = stored["weight_scale"].float().repeat_interleave(group, 1)[:, back]
    by_row = goldens.QuantizationArgs(**{**args, "strategy": "channel", "group_size": None})
    packed = goldens.BaseCompressor.get_value_from_registry("pack-quantized").compress(
        {"weight": torch.round(exact[:, back] / scale), "weight_scale": torch.ones(x.shape[0], 1)},
        goldens.QuantizationScheme(targets=["Linear"], weights=by_row))
    return {**packed, "weight_scale": stored["weight_scale"],
            "weight_g_idx": (back // group).int()}, exact[:, back]


def store_case(name, model, source, target):
    """Write the directory of a case; the decoded weights."""
    _, quantization, store = CASES[name]
    tensors, decoded = {}, {}
    linear = set(linear_names(model))
    for path, parameter in model.named_parameters():
        if path in linear:
            parts, exact = store(path, parameter.data.float().clone())
            tensors.update({path[:-len("weight")] + k: v.contiguous() for k, v in parts.items()})
            decoded[path] = exact.to(torch.float32)
        elif path != "lm_head.weight" or not model.config.tie_word_embeddings:
            tensors[path] = parameter.data.to(torch.bfloat16)
    target.mkdir(parents=True)
    save_file(tensors, target / "model.safetensors")
    copy_files(source, target, quantization)
    return decoded


def copy_files(source, target, quantization):
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": quantization},
                                                   indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, target)


def decode_compressed(directory, like):
    """Weights of a compressed-tensors directory, by that package; those of `like` that
    are not there stay."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    stored, decoded = load_file(directory / "model.safetensors"), {}
    group = config["config_groups"]["group_0"]
    form = group.get("format") or config["format"]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**group["weights"]))
    for path in like:
        module = path[:-len("weight")]
        parts = {k[len(module):]: v for k, v in stored.items() if k.startswith(module + "weight")}
        if "weight_global_scale" in parts:  # the package's own decoder makes bfloat16 of it
            decoded[path] = goldens.nvfp4_values(*(parts["weight_" + k]
                                                   for k in ("packed", "scale", "global_scale")))
        elif set(parts) != {"weight"}:
            decoder = BaseCompressor.get_value_from_registry(form)
            decoded[path] = decoder.decompress(parts, scheme)["weight"].to(torch.float32)
    floats = (torch.bfloat16, torch.float16, torch.float32)
    plain = {k: v.to(torch.float32) for k, v in stored.items() if v.dtype in floats
             and not k.endswith("_scale")}
    return {**plain, **decoded}


def e2m1_values(x):
    """The nearest e2m1, ties to an even mantissa."""
    bounds = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    size = x.abs()
    code = sum(((size > b) | ((size == b) & (i % 2 == 1))).long() for i, b in enumerate(bounds))
    return torch.sign(x) * goldens.E2M1[code]


def online(way, x):
    """What the setting `quantization` rounds a weight to (models/families/load/quantise.c)."""
    if way == "fp8":
        s = x.abs().amax(1, keepdim=True) / 448
        return (x / s).to(torch.float8_e4m3fn).float() * s
    if way == "mxfp4":
        rows = x.reshape(x.shape[0], -1, 32)
        most = rows.abs().amax(-1, keepdim=True)
        scale = torch.exp2(torch.floor(torch.log2(most.clamp(min=2.0**-120))) - 2)
        return (e2m1_values(rows / scale) * scale).reshape(x.shape)
    group = {"int8-g128": 128, "int8-g128-asymmetric": 128, "int4": 128}.get(way, x.shape[1])
    if x.shape[1] % group:
        return None
    rows = x.reshape(x.shape[0], -1, group)
    low, high = rows.amin(-1, keepdim=True).clamp(max=0), rows.amax(-1, keepdim=True).clamp(min=0)
    if way in ("int8", "int8-g128"):
        s = torch.maximum(-low, high) / 127
        return (torch.round(rows / s) * s).reshape(x.shape)
    if way in ("int8-asymmetric", "int8-g128-asymmetric"):
        s = (high - low) / 255
        z = torch.round(-128 - low / s).clamp(-128, 127)
        return (((torch.round(rows / s) + z).clamp(-128, 127) - z) * s).reshape(x.shape)
    s = ((high - low) / 15).to(torch.bfloat16).float()
    z = torch.round(-low / s).clamp(max=15)
    return (((torch.round(rows / s) + z).clamp(0, 15) - z) * s).reshape(x.shape)


def decode_gguf(path):
    reader = gguf.GGUFReader(path)
    heads = [reader.fields["llama.attention.head_count" + kv].contents() for kv in ("", "_kv")]
    out = {}
    for t in reader.tensors:
        parts = t.name.split(".")
        layer = int(parts[1]) if parts[0] == "blk" else -1
        key = t.name if layer < 0 else t.name.replace("blk.%d." % layer, "blk.%d.")
        x = gguf.dequantize(t.data,
                            t.tensor_type).astype(np.float32).reshape(
                                [int(d) for d in reversed(t.shape)])
        if "attn_q." in key or "attn_k." in key:
            x = to_hf.halves_from_pairs(x, heads["attn_k." in key])
        out[to_hf.NAMES[key] % layer if layer >= 0 else to_hf.NAMES[key]] = torch.from_numpy(
            np.ascontiguousarray(x))
    return out


def static_hooks(directory):
    """Module -> a hook that rounds its input by the file's scale for all of them."""
    config = json.loads((directory / "config.json").read_text()).get("quantization_config", {})
    groups = config.get("config_groups", {})
    kind = groups["group_0"]["weights"]["type"] if groups else "float"
    ends = ".input_scale"
    return {k[:-len(ends)]: goldens.inputs_rounded(kind, static=v.float().item())
            for k, v in load_file(directory / "model.safetensors").items() if k.endswith(ends)}


class Case:
    """A file that Quire serves, the arguments to do so, and the decoded weights."""

    def __init__(self, name, source, model, work):
        self.name, self.args, self.path = case_name(name), [], source
        self.rounds = any(part in name for part in ROUNDED) and not name.endswith(ALONE)
        made = work / name
        if name.endswith(".gguf"):
            self.path = pathlib.Path(name)
            self.weights = decode_gguf(name)
        elif name.startswith("online-"):
            way = name[len("online-"):]
            self.args = ["--quantization", way]
            self.weights = {p: online(way, dict(model.named_parameters())[p].data.float())
                            for p in linear_names(model)}
            self.weights = {p: v for p, v in self.weights.items() if v is not None}
        elif name.startswith("quire-"):
            shutil.rmtree(made, ignore_errors=True)
            way, *options = name[len("quire-"):].split("-")
            calibrated = {"static", "search"} & set(options)
            text = ["--text", work / "calibration.txt"] if calibrated else []
            run = [ROOT / "build/quire", "quantize", source, made, "--format", way,
                   *("--" + o for o in options), *text]
            with open(work / (name + ".log"), "w", encoding="utf-8") as log:
                subprocess.run(run, check=True, stdout=log)
            self.path = made
            self.weights = decode_compressed(made, linear_names(model))
        else:
            shutil.rmtree(made, ignore_errors=True)
            self.weights = store_case(name, model, source, made)
            self.path = made
        self.hooks = static_hooks(made) if self.path == made and made.is_dir() else {}
        self.rounds = self.rounds or bool(self.hooks)


# ---- logits ----

def windows_of(ids, n):
    return [ids[i:i + WINDOW] for i in range(0, n, WINDOW) if len(ids[i:i + WINDOW]) > 1]


def quire_seen(a, case, windows, vocab):
    """What is kept of Quire's logits, and which kernels made them."""
    with tempfile.NamedTemporaryFile(dir=a.work) as f:
        data = b"".join(struct.pack("<%di" % (len(x) + 1), len(x), *x) for x in windows)
        tool = [ROOT / "build/tests/bench/logits", case.path, f.name]
        p = subprocess.run([*tool, *case.args], input=data, capture_output=True)
        if p.returncode:
            sys.exit("%s: %s" % (case.name, p.stderr.decode()))
        found = re.search(r'tensors="([^"]*)"', p.stderr.decode())
        rows = np.memmap(f.name, np.float32, "r").reshape(-1, vocab)
        start = np.cumsum([0] + [len(x) for x in windows])
        seen = Seen(windows, lambda i, ids: np.array(rows[start[i]:start[i + 1]]))
        return seen, found.group(1) if found else ""


@torch.no_grad()
def reference_logits(model, window):
    return model(torch.tensor([window])).logits[0].numpy()


def keeps_inputs(path, n_layers):
    """Whether Quire keeps more than int8 of a product's inputs although it rounds them
    elsewhere (keeps_inputs in models/families/load/weights.c)."""
    layer = int(path.split(".")[2])
    return path.endswith(("q_proj", "k_proj", "v_proj")) or layer < 1 or layer >= n_layers - 2


@contextlib.contextmanager
def inputs_rounded(model, by_path):
    """The model with each of these hooks at the module of its path."""
    modules = dict(model.named_modules())
    hooks = [modules[path].register_forward_pre_hook(hook) for path, hook in by_path.items()]
    try:
        yield
    finally:
        for h in hooks:
            h.remove()


def rounded_logits(model, window, static):
    """By the file's scales, else where Quire rounds."""
    n_layers = model.config.num_hidden_layers
    paths = (path[:-len(".weight")] for path in linear_names(model))
    by_path = static or {p: goldens.rounded for p in paths if not keeps_inputs(p, n_layers)}
    with inputs_rounded(model, by_path):
        return reference_logits(model, window)


class Seen:
    """What is kept of logits: of each token the logarithm of the next one's probability
    and the best id; all logarithms of the second halves of the first KL_WINDOWS
    windows."""

    def __init__(self, windows, logits_of):
        following, best, late = [], [], []
        for i, ids in enumerate(windows):
            lp = torch.log_softmax(torch.from_numpy(logits_of(i, ids)), -1)
            following.append(lp[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
            best.append(lp.argmax(-1))
            if i < KL_WINDOWS:
                late.append(lp[WINDOW // 2:-1].clone())
        self.next, self.best, self.late = torch.cat(following), torch.cat(best), torch.cat(late)

    def perplexity(self):
        return math.exp(-self.next.double().mean().item())

    def kl(self, of):
        return (self.late.exp() * (self.late - of.late)).sum(-1).double().mean().item()


def kept(a, kind, model, of, make):
    """What `make` returns of the model's weights and `of`, from --work if it was made of
    the same before."""
    digest = hashlib.sha256(repr(of).encode())
    for key, value in sorted(model.state_dict().items()):
        digest.update(key.encode() + value.contiguous().numpy().tobytes())
    path = a.work / ("%s-%s.pt" % (kind, digest.hexdigest()[:16]))
    if not path.exists():
        torch.save(make(), path)
    return torch.load(path, weights_only=False)


def llama_kl(a, path, text, n_windows):
    """llama.cpp's own mean KL divergence of a file from the same file as float32, over
    the same text."""
    env = {**os.environ, "LD_LIBRARY_PATH": a.llama_cpp}
    with tempfile.TemporaryDirectory(dir=a.work) as d:
        plain, base, words = d + "/f32.gguf", d + "/base", d + "/text"
        pathlib.Path(words).write_text(text)
        run = lambda *args: subprocess.run(args, check=True, env=env, capture_output=True,
                                           text=True)
        run(a.llama_cpp + "/llama-quantize", "--allow-requantize", str(path), plain, "F32")
        common = [a.llama_cpp + "/llama-perplexity", "-f", words, "-c", str(WINDOW), "-t", "2",
                  "--chunks", str(n_windows), "--kl-divergence-base", base]
        run(*common, "-m", plain)
        p = run(*common, "-m", str(path), "--kl-divergence")
        return float(re.search(r"Mean\s+KLD:\s+(-?[\d.]+)", p.stdout + p.stderr).group(1))


def load(model, floats, weights):
    state = dict(floats)
    state.update(weights)
    if model.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)


def perplexity(a, model, floats, ids, text, case):
    blocks = case.name.startswith("gguf-")
    windows = windows_of(ids, a.tokens or (GGUF_TOKENS if blocks else TOKENS))
    plainly = lambda: Seen(windows, lambda _, x: reference_logits(model, x))
    load(model, floats, {})
    source = kept(a, "exact", model, windows, plainly)
    load(model, floats, case.weights)
    ref = kept(a, "exact", model, windows, plainly)
    row = {"tokens": len(ref.next), "source": source.perplexity(), "reference": ref.perplexity()}
    if case.rounds:
        as_rounded = lambda _, x: rounded_logits(model, x, case.hooks)
        of = [windows, case.name] if case.hooks else windows
        kind = "static" if case.hooks else "rounded-fine"
        rounded = kept(a, kind, model, of, lambda: Seen(windows, as_rounded))
        row.update(rounded=rounded.perplexity(), kl_rounded=ref.kl(rounded))
    if not a.references:
        got, kernels = quire_seen(a, case, windows, model.config.vocab_size)
        row.update(quire=got.perplexity(), ratio=got.perplexity() / ref.perplexity(),
                   kl=ref.kl(got),
                   same_best=(ref.best == got.best).double().mean().item(), kernels=kernels)
    if a.llama_cpp and blocks:
        row["llama_cpp"] = llama_kl(a, case.path, text, min(len(windows), KL_WINDOWS))
    if "kl" in row and (not blocks or "llama_cpp" in row):
        row["met"] = perplexity_met(row, case, blocks)
    return row


def perplexity_met(row, case, blocks):
    """Whether the bar above is met. Where inputs are rounded, the noise of the ratio, about
    (2 kl / tokens)^0.5, is more than 0.1 %, and the divergence is judged."""
    if blocks:
        return row["kl"] <= row["llama_cpp"]
    if case.rounds:
        return row["kl"] <= KL_OF_ROUNDED * row["kl_rounded"]
    return abs(row["ratio"] - 1) <= RATIO_BAR


@torch.no_grad()
def sampled(model, n):
    """Texts of the model itself, a window each, temperature 1."""
    torch.manual_seed(1)
    start, more = torch.full((-(-n // WINDOW), 1), model.config.bos_token_id), WINDOW - 1
    said = model.generate(start, do_sample=True, top_k=0, temperature=1.0, min_new_tokens=more,
                          max_new_tokens=more)
    return said.flatten().tolist()


# ---- greedy ----

def continuations(case, prompts, n_new, work):
    """Greedy texts of a running server, all prompts at once."""
    import time
    import urllib.request
    port = 18700 + os.getpid() % 100
    flags = ["--port", str(port), "--device", "cpu", "--served-model-name", "m", "--max-model-len",
             "512"]
    with open(work / (case.name + "-server.log"), "w", encoding="utf-8") as log:
        run = [ROOT / "build/quire", "serve", case.path, *flags, *case.args]
        server = subprocess.Popen(run, stdout=log, stderr=log)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen("http://127.0.0.1:%d/health" % port)
                break
            except OSError:
                time.sleep(0.1)
        body = {"model": "m", "prompt": prompts, "max_tokens": n_new, "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True}
        request = urllib.request.Request("http://127.0.0.1:%d/v1/completions" % port,
                                         json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        choices = json.load(urllib.request.urlopen(request))["choices"]
        return [c["token_ids"] for c in sorted(choices, key=lambda c: c["index"])]
    finally:
        server.terminate()
        server.wait()


@torch.no_grad()
def gaps(model, prompts, texts):
    """[prompts, tokens]: how far each token is behind the reference's best, in nats."""
    ids = torch.tensor([p + t for p, t in zip(prompts, texts)])
    out = []
    for part in ids.split(25):
        said = model(part[:, :-1], logits_to_keep=part.shape[1] - len(prompts[0]))
        lp = torch.log_softmax(said.logits, -1)
        out.append(lp.amax(-1) - lp.gather(2, part[:, len(prompts[0]):, None])[:, :, 0])
    return torch.cat(out)


@torch.no_grad()
def in_bfloat16(model, prompts, n_new):
    """Greedy texts of the model in bfloat16; end tokens do not end them."""
    model = copy.deepcopy(model).to(torch.bfloat16)
    model.generation_config.eos_token_id = None
    out = []
    for part in torch.tensor(prompts).split(50):
        said = model.generate(part, attention_mask=torch.ones_like(part), do_sample=False,
                              max_new_tokens=n_new)
        out += said[:, part.shape[1]:].tolist()
    return out


def greedy(a, model, floats, ids, _, case):
    prompts = [ids[i:i + 32] for i in range(0, 32 * a.prompts, 32)]
    load(model, floats, case.weights)
    texts = continuations(case, prompts, a.new, a.work)
    of = [prompts, texts, case.name] if case.hooks else [prompts, texts]
    with inputs_rounded(model, case.hooks):
        behind = kept(a, "gaps", model, of, lambda: gaps(model, prompts, texts)).amax(1)
    row = {"prompts": len(prompts), "new": a.new, "equal": (behind == 0).double().mean().item(),
           "held": (behind <= a.tie).double().mean().item(), "tie": a.tie,
           "furthest": behind.amax().item()}
    if a.bfloat16:
        behind = gaps(model, prompts, in_bfloat16(model, prompts, a.new)).amax(1)
        row["held_bfloat16"] = (behind <= a.tie).double().mean().item()
    return row


# ---- what is measured ----

def measured(a):
    """(what, case) of the lines that --out has, with --resume."""
    if not a.resume or not a.out or not os.path.exists(a.out):
        return set()
    with open(a.out, encoding="utf-8") as f:
        return {(row["what"], row["case"]) for row in map(json.loads, f) if "what" in row}


def case_name(name):
    return "gguf-" + pathlib.Path(name).stem if name.endswith(".gguf") else name


def gguf_files(a):
    """--gguf-source in every type that can be made of it, by name."""
    if not a.gguf_source:
        return []
    quantised = script("make-quantised")
    formats = (*quantised.BLOCKS, "Q4_K_M") if a.ggml else quantised.PLAIN + quantised.MADE_HERE
    order = [f for f in GGUF_FIRST if f in formats] + [f for f in formats if f not in GGUF_FIRST]
    return [str(a.work / "gguf" / (f + ".gguf")) for f in order]


def make_gguf(a, path):
    library = ["--ggml", a.ggml] if a.ggml else []
    subprocess.run([sys.executable, ROOT / "scripts/make-quantised", *library, a.gguf_source,
                    path.parent, path.stem], check=True)


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("perplexity", "greedy", "all"))
    p.add_argument("--model", required=True, type=pathlib.Path)
    p.add_argument("--work", required=True, type=pathlib.Path,
                   help="where files of the cases are made")
    p.add_argument("--gguf", nargs="*", default=[])
    p.add_argument("--gguf-source", metavar="FILE", help="also in every other type of GGUF")
    p.add_argument("--ggml", metavar="LIB", help="libggml-base.so, which makes all of them")
    p.add_argument("--llama-cpp", metavar="DIR")
    p.add_argument("--references", action="store_true", help="run the references alone")
    p.add_argument("--tokens", type=int, help="default: %d; of GGUF files %d, whose ratio is "
                   "noisier" % (TOKENS, GGUF_TOKENS))
    p.add_argument("--prompts", type=int, default=200)
    p.add_argument("--new", type=int, default=32)
    p.add_argument("--tie", type=float, default=0.1)
    p.add_argument("--bfloat16", action="store_true",
                   help="greedy: what transformers holds in bfloat16, too")
    p.add_argument("--out", help="append the lines to this file")
    p.add_argument("--resume", action="store_true", help="but for those that it has")
    p.add_argument("--cases", nargs="*", default=CASES_DEFAULT, dest="case", metavar="CASE",
                   help="default: all but GGUF files")
    p.add_argument("--text", nargs="+", metavar="FILE", help="default: the pages at PAGES_AT")
    p.add_argument("--sampled", action="store_true", help="what the model of floats itself says")
    a = p.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    a.case = a.case + a.gguf + gguf_files(a)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(a.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32).eval()
    floats = copy.deepcopy(model.state_dict())
    text = pages(TEXT) if not a.text else "\n".join(open(f, encoding="utf-8").read() for f in a.text)
    most = max(a.tokens or GGUF_TOKENS, 32 * a.prompts)
    ids = sampled(model, most) if a.sampled else tokenizer(text).input_ids
    if len(ids) < most:
        p.error("the text has %d tokens" % len(ids))
    (a.work / "calibration.txt").write_text(pages(CALIBRATION), encoding="utf-8")
    measures = {"perplexity": (perplexity,), "greedy": (greedy,), "all": (perplexity, greedy)}
    done = measured(a)
    for name in a.case:
        missing = [m for m in measures[a.what] if (m.__name__, case_name(name)) not in done]
        if not missing:
            continue
        load(model, floats, {})
        if name.endswith(".gguf") and not os.path.exists(name):
            make_gguf(a, pathlib.Path(name))
        case = Case(name, a.model, model, a.work)
        for measure in missing:
            row = {"case": case.name, "what": measure.__name__,
                   **measure(a, model, floats, ids, text, case)}
            line = json.dumps(row)
            print(line, flush=True)
            if a.out:
                with open(a.out, "a", encoding="utf-8") as f:
                    f.write(line + "\n")


if __name__ == "__main__":
    main()
