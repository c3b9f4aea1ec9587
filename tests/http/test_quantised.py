"""Quantised directories, made of the bundled model by rounding to nearest: what the log
says of them, and how far a text's log-probabilities move."""
import contextlib
import glob
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import time
import urllib.request

import numpy as np
import pytest
import quantised_models
from conftest import PATIENCE_S, QUIRE, ROOT
from float64_model import Float64Model
from tokenizers import Tokenizer

DEMO = os.path.join(ROOT, "models", "demo")
FLAGS = ["--device", "cpu", "--max-model-len", "256"]
TEXT = ("Once upon a time there was a little girl who had a red ball. She liked to play with her "
        "ball in the park every day. One day, the ball rolled away and she was very sad. Her mom "
        "helped her to look for it, and they found it under a big tree.")


def read(path):
    """name -> (shape, float32 values) of a safetensors file of bfloat16."""
    with open(path, "rb") as f:
        data = f.read()
    n = struct.unpack("<Q", data[:8])[0]
    tensors = {}
    for name, t in json.loads(data[8:8 + n]).items():
        if name != "__metadata__":
            assert t["dtype"] == "BF16"
            begin, end = t["data_offsets"]
            raw = np.frombuffer(data[8 + n + begin:8 + n + end], np.uint16)
            tensors[name] = (raw.astype(np.uint32) << 16).view(np.float32).reshape(t["shape"])
    return tensors


def write(path, tensors):
    """tensors: name -> (type, array of its bytes' shape)."""
    header, at = {}, 0
    for name, (kind, x) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text
                + b"".join(np.ascontiguousarray(x).tobytes() for _, x in tensors.values()))


def int8_channel(w):
    scale = np.abs(w).max(1, keepdims=True) / 127
    return {"weight": ("I8", np.rint(w / scale).astype(np.int8)),
            "weight_scale": ("F32", scale.astype(np.float32))}


def int4_groups(w):
    groups = w.reshape(w.shape[0], -1, 32)
    scale = (np.abs(groups).max(2, keepdims=True) / 7.5).astype(np.float16).astype(np.float32)
    codes = (np.rint(groups / scale).clip(-8, 7) + 8).astype(np.uint32).reshape(w.shape[0], -1, 8)
    packed = np.bitwise_or.reduce(codes << (4 * np.arange(8, dtype=np.uint32)), axis=2)
    return {"weight_packed": ("I32", packed.astype(np.uint32)),
            "weight_scale": ("F16", scale[:, :, 0].astype(np.float16)),
            "weight_shape": ("I64", np.array(w.shape, np.int64))}


def gptq(w):
    """The same codes, along the input; zero points are stored minus 1."""
    parts = int4_groups(w)
    words = parts["weight_packed"][1].T
    scale = parts["weight_scale"][1].T
    return {"qweight": ("I32", words), "scales": ("F16", scale),
            "qzeros": ("I32", np.full((scale.shape[0], w.shape[0] // 8), 0x77777777, np.uint32)),
            "g_idx": ("I32", (np.arange(w.shape[1]) // 32).astype(np.int32))}


def autoround(w):
    """As GPTQ's, without an order of columns."""
    return {name: part for name, part in gptq(w).items() if name != "g_idx"}


def compressed(form, **weights):
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"],
                                          "weights": {"type": "int", "symmetric": True,
                                                      **weights}}}}


FORMATS = {
    "INT8": (int8_channel, compressed("int-quantized", num_bits=8, strategy="channel"), 0.02),
    "INT4": (int4_groups, compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
             0.15),
    "GPTQ": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False,
                    "sym": True}, 0.15),
    "AutoRound": (autoround, {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int",
                              "packing_format": "auto_round:auto_gptq", "autoround_version": "0.8.0"}, 0.15),
}


def quantise(directory, form):
    make, quantization, _ = FORMATS[form]
    shutil.copytree(DEMO, directory, dirs_exist_ok=True)
    tensors = {}
    for name, w in read(os.path.join(DEMO, "model.safetensors")).items():
        if name.endswith("_proj.weight"):
            tensors.update({name[:-len("weight")] + part: t for part, t in make(w).items()})
        else:
            tensors[name] = ("F32", w)
    write(os.path.join(directory, "model.safetensors"), tensors)
    with open(os.path.join(directory, "config.json")) as f:
        config = json.load(f)
    with open(os.path.join(directory, "config.json"), "w") as f:
        json.dump({**config, "quantization_config": quantization}, f)


def log_probabilities(server):
    """Of the tokens of TEXT but the first."""
    body = {"prompt": TEXT, "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0}
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        each = json.load(answer)["choices"][0]["logprobs"]["token_logprobs"]
    return np.array(each[1:-1])


def log_probability(server):
    return float(np.mean(log_probabilities(server)))


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    made = {}
    for form in FORMATS:
        made[form] = str(tmp_path_factory.mktemp("quantised") / form)
        quantise(made[form], form)
    return made


def test_a_text_is_as_likely_as_with_the_model_itself(start, directories):
    exact = log_probability(start(*FLAGS, model=DEMO))
    each = {}
    for form, directory in directories.items():
        server = start(*FLAGS, model=directory)
        each[form] = log_probability(server)
        stored = form if form not in ("GPTQ", "AutoRound") else "INT4"
        ways = ["56 of %s by %s" % (stored, way) for way in ("int8", "plain loops")]
        assert any(way in server.log for way in ways)
        print(form, "moves the mean log-probability by", each[form] - exact)
        assert abs(each[form] - exact) < FORMATS[form][2]
    assert each["GPTQ"] == each["AutoRound"] == each["INT4"]  # the same codes and scales in another order


def int8_at_load(w, group, zeros):
    """What int8 makes of a weight's groups, all of a row without `group`."""
    x = w.reshape(len(w), -1, group or w.shape[1])
    low, high = np.minimum(x.min(2, keepdims=True), 0), np.maximum(x.max(2, keepdims=True), 0)
    scale = ((high - low) / 255 if zeros else np.maximum(-low, high) / 127).astype(np.float32)
    zero = np.rint(-128 - low / scale).clip(-128, 127) if zeros else 0
    return (((np.rint(x / scale) + zero).clip(-128, 127) - zero) * scale).reshape(w.shape)


@pytest.mark.parametrize("form, group, zeros", [("int8", 0, False), ("int8-g128", 128, False), ("int8-asymmetric", 0, True),
                                                ("int8-g128-asymmetric", 128, True)])
def test_int8_at_load_is_the_model_of_rounded_weights(start, form, group, zeros):
    plain, server = start(*FLAGS, model=DEMO), start(*FLAGS, "--quantization", form, model=DEMO)
    assert "quantised to INT8, by" in server.log
    model, ids = Float64Model(DEMO), ids_of(TEXT, special=True)
    usual = rms(log_probabilities(plain) - model.log_probabilities(ids, False))
    for module, w in model.weight.items():
        if module.endswith("_proj") and w.shape[1] % (group or 1) == 0:
            model.weight[module] = int8_at_load(w, group, zeros)
    apart = rms(log_probabilities(server) - model.log_probabilities(ids, False))
    print(form, "usual", usual, "apart", apart)
    assert apart <= 1.5 * usual


def test_a_setting_that_quantises_nothing_is_told(start, directories):
    for model, ranks, told in ((directories["INT8"], "1", 1), (directories["GPTQ"], "2", 2),
                               (DEMO, "1", 0), (DEMO, "2", 0)):  # by each rank
        server = start(*FLAGS, "--quantization", "fp8", "--tensor-parallel-size", ranks, model=model)
        warning = [line for line in server.log.splitlines() if "quantization has no effect" in line]
        assert len(warning) == told and all(" warn " in line for line in warning), server.log


def test_a_model_in_several_gguf_files(start, tmp_path):
    folder = str(tmp_path / "demo")
    shutil.copytree(DEMO, folder)
    with open(os.path.join(folder, "tokenizer_config.json"), "r+") as f:
        own = json.load(f) | {"chat_template": "{{ messages[0].content }}"}
        f.seek(0)
        json.dump(own, f)
    one, first = (quantised_models.write_gguf(folder, "q8_0", parts) for parts in (1, 3))
    whole, parted = start(*FLAGS, model=one), start(*FLAGS, model=first)
    assert np.array_equal(log_probabilities(whole), log_probabilities(parted))
    second = first.replace("-00001-", "-00002-")
    for path, words in ((second, "is file 2 of 3 of a model; give the first one"), (first, "model-00002-of-00003.gguf: No such file")):
        if path == first:
            os.unlink(second)
        failed = subprocess.run([QUIRE, "serve", *FLAGS, "--port", "0", "--model", path], capture_output=True, text=True)
        assert failed.returncode == 1 and words in failed.stderr, failed.stderr


def test_ranks_divide_rows_and_are_refused_groups(start, directories):
    one, two = (start(*FLAGS, "--tensor-parallel-size", str(n), model=directories["INT8"])
                for n in (1, 2))
    assert abs(log_probability(one) - log_probability(two)) < 0.01
    server = start(*FLAGS, "--tensor-parallel-size", "4", model=directories["INT4"], wait=False)
    assert server.process.wait(60) == 1
    assert "tensor_parallel_size 4 cuts the groups of 32 values of model.layers." in server.log


# ---- directories that are not what they say ----

UP = "model.layers.3.mlp.up_proj."


def config_without(config):
    del config["quantization_config"]


def weights_with(**members):
    return lambda config: config["quantization_config"]["config_groups"]["group_0"][
        "weights"].update(members)


def first_scale(value):
    """The first scale of UP."""
    def edit(data, header, begin):
        at = begin + header[UP + "weight_scale"]["data_offsets"][0]
        return data[:at] + struct.pack("<f", value) + data[at + 4:]
    return edit


def cut_short(data, header, begin):
    return data[:-100]


@pytest.fixture(scope="module")
def int8(tmp_path_factory):
    made = str(tmp_path_factory.mktemp("int8") / "q")
    assert quantize(DEMO, made, "--format", "int8", "--asymmetric").returncode == 0
    return made


@pytest.mark.parametrize("edit_config, edit_file, why", [
    (config_without, None,
     "is part of a quantised weight, but config.json has no quantization_config"),
    (weights_with(symmetric=True), None,
     "weight_zero_point has zero points, but quantization_config says that the codes are "
     "symmetric"),
    (weights_with(num_bits=4), None, "no codes of INT4"),
    (weights_with(type="float"), None,
     "asymmetric float weights of 8 bits (int-quantized) are not supported"),
    (weights_with(type="float", symmetric=True), None, "no codes of FP8"),
    (weights_with(strategy="tensor"), None, "weight_scale is [256, 1], must be [1, 1]"),
    (lambda config: config["quantization_config"].update(ignore=[UP[:-1]]), None,
     "leaves model.layers.3.mlp.up_proj alone"),
    (lambda config: config["quantization_config"].update(quant_method="quip"), None,
     "quant_method 'quip', supported are"),
    (None, first_scale(float("nan")), UP + "weight_scale: scale 0 is nan"),
    (None, first_scale(0.0), UP + "weight_scale: scale 0 is 0"),
    (None, cut_short, "it is not complete")])
def test_what_does_not_fit_is_refused_in_one_line(start, tmp_path, int8, edit_config, edit_file,
                                                  why):
    directory = tmp_path / "q"
    shutil.copytree(int8, directory)
    if edit_config:
        config = json.loads((directory / "config.json").read_text())
        edit_config(config)
        (directory / "config.json").write_text(json.dumps(config))
    if edit_file:
        data = (directory / "model.safetensors").read_bytes()
        n = struct.unpack("<Q", data[:8])[0]
        (directory / "model.safetensors").write_bytes(edit_file(data, json.loads(data[8:8 + n]),
                                                                8 + n))
    server = start(*FLAGS, model=str(directory), wait=False)
    assert server.process.wait(60) == 1
    errors = [line for line in server.log.splitlines() if " error " in line]
    assert len(errors) == 1 and why in errors[0], server.log


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize("code, row", [(0x7F, 0), (0xFF, -1)])
def test_a_code_of_fp8_that_is_no_number_is_refused_in_one_line(start, tmp_path, code, row, ranks):
    """Of any rank's rows; the codes beside them, the greatest ones, are served."""
    made = tmp_path / "q"
    assert quantize(DEMO, str(made), "--format", "fp8").returncode == 0
    data = bytearray((made / "model.safetensors").read_bytes())
    n = struct.unpack("<Q", data[:8])[0]
    weight = json.loads(data[8:8 + n])[UP + "weight"]
    rows, cols = weight["shape"]
    at = 8 + n + weight["data_offsets"][0] + row % rows * cols + 5
    data[at] = code - 1
    (made / "model.safetensors").write_bytes(data)
    flags = (*FLAGS, "--tensor-parallel-size", ranks)
    assert np.isfinite(log_probability(start(*flags, model=str(made))))
    data[at] = code
    (made / "model.safetensors").write_bytes(data)
    server = start(*flags, model=str(made), wait=False)
    assert server.process.wait(60) == 1
    errors = [line for line in server.log.splitlines() if "cannot start" in line]
    assert len(errors) == 1 and f"{UP}weight (FP8): the code in row {row % rows}, column 5 is no number" in errors[0], server.log


# ---- quire quantize ----

def quantize(*args):
    return subprocess.run([QUIRE, "quantize", *args], capture_output=True, text=True, timeout=120,
                          check=False)


@pytest.mark.parametrize("form, stored, most", [("fp8", "FP8", 0.05), ("int8", "INT8", 0.02),
                                                ("int4", "INT4", 0.2),
                                                ("nvfp4", "FP4", 0.2), ("mxfp4", "FP4", 0.3)])
def test_what_quantize_writes_is_served(start, tmp_path, form, stored, most):
    made = quantize(DEMO, str(tmp_path / form), "--format", form)
    assert made.returncode == 0, made.stderr
    lines = made.stdout.splitlines()
    assert len(lines) == 57 and lines[-1].startswith("56 weights, mean ")
    error = {line.split()[0]: float(line.split()[1]) for line in lines[:-1]}
    with open(tmp_path / form / "model.safetensors", "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
    codes = "weight_packed" if "4" in form else "weight"
    kinds = {"fp8": "F8_E4M3", "int8": "I8", "int4": "I32"}
    assert all(header[name[:-len("weight")] + codes]["dtype"] == kinds.get(form, "U8")
               for name in error)
    scales = {"nvfp4": "F8_E4M3", "mxfp4": "U8"}
    assert all(header[name + "_scale"]["dtype"] == scales.get(form, "F32") for name in error)
    if form == "int8":  # what rounding to steps of a row's greatest / 127 does
        exact = read(os.path.join(DEMO, "model.safetensors"))
        for name, e in error.items():
            w = exact[name]
            scale = np.abs(w).max(1, keepdims=True) / 127
            assert abs(e - np.linalg.norm(np.rint(w / scale) * scale - w) / np.linalg.norm(
                w)) < 1e-5
    server = start(*FLAGS, model=str(tmp_path / form))
    assert "56 of %s" % stored in server.log
    moved = log_probability(server) - log_probability(start(*FLAGS, model=DEMO))
    print(form, "moves the mean log-probability by", moved)
    assert abs(moved) < most


def numbers(line):
    """perplexity of N tokens BEFORE, quantised AFTER"""
    words = line.replace(",", "").split()
    assert words[0] == "perplexity" and words[5] == "quantised", line
    return int(words[2]), float(words[4]), float(words[6])


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text(TEXT * 6)
    return str(path)


def test_factors_leave_the_model_as_it_is_and_make_int8_better(start, tmp_path, story):
    """Inputs whose columns differ by a factor of 30, put into the model by its own
    norms: the same model in float32, and a hard one for codes with a scale a token."""
    rng = np.random.default_rng(1)
    exact = read(os.path.join(DEMO, "model.safetensors"))
    for layer in range(8):
        for norm, readers in (("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj",
                                                   "self_attn.v_proj")),
                              ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj"))):
            factor = np.exp2(rng.integers(0, 6, 256)).astype(np.float32)
            exact["model.layers.%d.%s.weight" % (layer, norm)] *= factor
            for name in readers:
                exact["model.layers.%d.%s.weight" % (layer, name)] /= factor
    hard = tmp_path / "hard"
    shutil.copytree(DEMO, hard, ignore=shutil.ignore_patterns("*.md"))
    write(hard / "model.safetensors", {k: ("F32", v.astype(np.float32)) for k, v in exact.items()})
    after = {}
    for how in ((), ("--smooth", "0.5"), ("--search",)):
        target = str(tmp_path / ("q" + "".join(how).replace("-", "")))
        made = quantize(str(hard), target, "--format", "int8", "--text", story, *how)
        assert made.returncode == 0, made.stderr
        lines = made.stdout.splitlines()
        n, before, after[how] = numbers(lines[-1])
        layers = [line.rsplit(None, 4) for line in lines if line.startswith("layer ")]
        assert len(layers) == (24 if how else 0) and n > 100
        if how == ("--search",):
            assert all(float(x[-1]) <= float(x[1].rstrip(",")) * 1.01 for x in layers)
    print(before, after)
    lost = {how: abs(np.log(x / before)) for how, x in after.items()}
    assert lost[("--smooth", "0.5")] < lost[()] / 2 and lost[("--search",)] < lost[()] / 2
    server = start(*FLAGS, model=str(tmp_path / "qsmooth0.5"))
    assert abs(log_probability(server) - log_probability(start(*FLAGS, model=DEMO))) < 0.02


def test_a_search_is_for_int4_too(start, tmp_path, story):
    made = quantize(DEMO, str(tmp_path / "q"), "--format", "int4", "--text", story, "--search",
                    "--tokens", "400")
    assert made.returncode == 0, made.stderr
    n, before, after = numbers(made.stdout.splitlines()[-1])
    assert n <= 200 and 0.8 * before < after < 1.3 * before
    moved = log_probability(start(*FLAGS, model=str(tmp_path / "q"))) - log_probability(
        start(*FLAGS, model=DEMO))
    assert abs(moved) < 0.2


@pytest.mark.parametrize("form, options, stored, most", [("int8", ("--asymmetric",), "INT8", 0.02),
                                                         ("int4", ("--asymmetric",), "INT4", 0.2)])
def test_zero_points_are_served(start, tmp_path, story, form, options, stored, most):
    made = quantize(DEMO, str(tmp_path / "q"), "--format", form, "--text", story, *options)
    assert made.returncode == 0, made.stderr
    _, before, after = numbers(made.stdout.splitlines()[-1])
    assert abs(np.log(after / before)) < 3 * most
    group, header = described(tmp_path / "q")
    assert sum(k.endswith("weight_zero_point") for k in header) == 56
    assert not any(k.endswith("input_scale") for k in header)
    assert not group["weights"]["symmetric"]
    if form == "int8":
        assert group["input_activations"]["dynamic"]
        assert group["input_activations"]["strategy"] == "token"
    server = start(*FLAGS, model=str(tmp_path / "q"))
    assert "56 of %s" % stored in server.log
    moved = log_probability(server) - log_probability(start(*FLAGS, model=DEMO))
    print(form, options, "moves the mean log-probability by", moved)
    assert abs(moved) < most


def described(directory):
    """The first group of the configuration, and the header of the file."""
    with open(directory / "config.json") as f:
        group = json.load(f)["quantization_config"]["config_groups"]["group_0"]
    with open(directory / "model.safetensors", "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
    return group, header


def ids_of(text, special=False):
    return Tokenizer.from_file(os.path.join(DEMO, "tokenizer.json")).encode(
        text, add_special_tokens=special).ids


def rms(x):
    return float(np.sqrt(np.mean(np.square(x))))


@pytest.mark.parametrize("form, options, stored",
                         [("int8", ("--static",), "INT8"), ("fp8", ("--static",), "FP8"),
                          ("int8", ("--static", "--asymmetric", "--search"), "INT8")])
def test_fixed_scales_err_as_rounding_by_them_does(start, tmp_path, story, form, options, stored):
    """Against the decoded weights in float64, where the inputs of products are rounded by the file's
    scales and nothing else is. Inputs near the middle between two codes go either way, so errors
    are not the same, and how far they are apart differs from processor to processor: half of what
    is explained, or three quarters. Errors of another origin would be apart by 1.4 times that."""
    made = quantize(DEMO, str(tmp_path / "q"), "--format", form, "--text", story, *options)
    assert made.returncode == 0, made.stderr
    group, header = described(tmp_path / "q")
    assert sum(k.endswith("input_scale") for k in header) == 56
    zeros = sum(k.endswith("weight_zero_point") for k in header)
    assert zeros == (56 if "--asymmetric" in options else 0)
    assert not group["input_activations"]["dynamic"]
    assert group["input_activations"]["strategy"] == "tensor"
    server = start(*FLAGS, model=str(tmp_path / "q"))
    assert "56 of %s" % stored in server.log
    model, served = Float64Model(tmp_path / "q"), log_probabilities(server)
    exact, rounded = (model.log_probabilities(ids_of(TEXT, special=True), rounds)
                      for rounds in (False, True))
    explained = rms(rounded - exact)
    print(form, options, "explained", explained, "served", rms(served - exact), "apart",
          rms(served - rounded))
    assert rms(served - exact) <= 1.25 * explained
    assert rms(served - rounded) <= explained
    perplexities_are_explained(made.stdout.splitlines()[-1], model, story)


def perplexities_are_explained(line, model, story):
    """Those that `quire quantize` prints of the text's second half: the source's, and that of inputs
    rounded by the file's scales, but for three standard deviations of the mean of their errors."""
    n, before, after = numbers(line)
    with open(story) as f:
        ids = ids_of(f.read())
    half = ids[len(ids) // 2:]
    source = Float64Model(DEMO).log_probabilities(half, False)
    exact, rounded = (model.log_probabilities(half, rounds) for rounds in (False, True))
    print("perplexity", before, np.exp(-source.mean()), after, np.exp(-rounded.mean()))
    assert n == len(half) - 1
    assert abs(np.log(before) + source.mean()) < 1e-3
    assert abs(np.log(after) + rounded.mean()) <= 3 * rms(rounded - exact) / np.sqrt(n)


def test_a_fixed_scale_is_of_the_first_half_of_the_text(tmp_path, story):
    """The input of layer 0's q, k and v: embeddings and a norm, by hand."""
    target = tmp_path / "q"
    assert quantize(DEMO, str(target), "--format", "int8", "--text", story,
                    "--static").returncode == 0
    with open(story) as f:
        ids = ids_of(f.read())
    exact = read(os.path.join(DEMO, "model.safetensors"))
    x = exact["model.embed_tokens.weight"][ids[:len(ids) // 2]]
    x = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * exact[
        "model.layers.0.input_layernorm.weight"]
    with open(target / "model.safetensors", "rb") as f:
        data = f.read()
    n = struct.unpack("<Q", data[:8])[0]
    for part in ("q", "k", "v"):
        begin, end = json.loads(data[8:8 + n])["model.layers.0.self_attn.%s_proj.input_scale"
                                               % part]["data_offsets"]
        scale = struct.unpack("<f", data[8 + n + begin:8 + n + end])[0]
        assert abs(scale * 127 / np.abs(x).max() - 1) < 0.02  # activations of bfloat16


def test_quantize_refuses_options_without_their_text(tmp_path, story):
    empty, other = tmp_path / "empty", os.path.join(ROOT, "tests", "golden", "olmo2")
    empty.write_text("")
    for source, form, options, status, why in (
            (DEMO, "int8", ("--search",), 2, "usage"),
            (DEMO, "int8", ("--text", story, "--smooth", "0.5", "--search"), 2, "usage"),
            (DEMO, "int8", ("--text", story, "--smooth", "1.5"), 2, "usage"),
            (DEMO, "int8", ("--text", story, "--tokens", "3"), 2, "usage"),
            (DEMO, "fp8", ("--text", story, "--search"), 1, "smoothing is for int8"),
            (DEMO, "int4", ("--text", story, "--smooth", "0.5"), 1, "smoothing is for int8"),
            (DEMO, "int8", ("--static",), 2, "usage"),
            (DEMO, "int4", ("--static", "--text", story), 1,
             "scales of activations are for fp8 and int8"),
            (DEMO, "fp8", ("--asymmetric",), 1, "zero points are for int8 and int4"),
            (DEMO, "int8", ("--text", str(empty)), 1, "empty text"),
            (DEMO, "int8", ("--text", str(tmp_path / "none")), 1, "No such file"),
            (other, "int8", ("--text", story, "--search"), 1, "tokenizer")):
        target = tmp_path / "q"
        made = quantize(source, str(target), "--format", form, *options)
        assert made.returncode == status and why in made.stderr, (options, made.stderr)
        assert not target.exists()


def test_quantize_refuses_what_it_cannot_do(tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    int8 = tmp_path / "int8"
    assert quantize(DEMO, str(int8), "--format", "int8").returncode == 0
    golden = os.path.join(ROOT, "tests", "golden")
    for source, target, form, status, why in (
            (DEMO, taken, "int8", 1, "File exists"),
            (DEMO, tmp_path / "a", "int3", 2, "--format int3 is not understood\nusage"),
            (str(int8), tmp_path / "b", "int8", 1, f"{int8} is quantised already"),
            (os.path.join(golden, "gpt2"), tmp_path / "c", "int8", 1, "transposed"),
            (os.path.join(golden, "mixtral"), tmp_path / "d", "int4", 1, "no groups of 32"),
            (os.path.join(golden, "llama-mha24"), tmp_path / "e", "int4", 1, "no groups of 32"),
            (str(tmp_path / "none"), tmp_path / "f", "int8", 1, "No such file")):
        made = quantize(source, str(target), "--format", form)
        assert made.returncode == status and why in made.stderr, made.stderr


def test_quantize_takes_values_behind_an_equals_sign(tmp_path):
    for i, (arguments, why) in enumerate(((["--format=int8", "--tokens=8"], ""),
                                          (["--format=int8", "--format="], "--format= is not"),
                                          (["--format=int8", "--formats=int8"], "--formats=int8 is"),
                                          (["--format=int8", "--tokens"], "--tokens is not"),
                                          (["--format=int8", "more"], "more is not understood"))):
        made = subprocess.run([QUIRE, "quantize", DEMO, str(tmp_path / str(i)), *arguments], text=True,
                              capture_output=True)
        assert made.returncode == (2 if why else 0), made.stderr
        assert made.stderr.startswith("quire quantize: " + why if why else ""), made.stderr


def quantize_command(target):
    return [QUIRE, "quantize", DEMO, str(target), "--format", "int8"]


@pytest.mark.parametrize("handler", (signal.SIG_IGN, signal.SIG_DFL))
def test_quantize_leaves_nothing_where_a_file_cannot_grow(tmp_path, handler):
    def limit():
        signal.signal(signal.SIGXFSZ, handler)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    made = subprocess.run(quantize_command(tmp_path / "q"), preexec_fn=limit, text=True,
                          capture_output=True)
    assert made.returncode == 1 and made.stderr.count("\n") == 1, made.stderr
    why = "q/model.safetensors: File too large" if handler == signal.SIG_IGN else "signal 25"
    assert why in made.stderr and os.listdir(tmp_path) == []


@pytest.mark.parametrize("sent", (signal.SIGINT, signal.SIGTERM))
def test_quantize_leaves_nothing_where_a_signal_ends_it(tmp_path, sent):
    reader, terminal = os.openpty()
    os.set_blocking(terminal, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(terminal, b" " * 1000)
    os.set_blocking(terminal, True)
    # It stands before the first line of its report, in the middle of the weights.
    q = subprocess.Popen(quantize_command(tmp_path / "q"), stdout=terminal, text=True,
                         stderr=subprocess.PIPE)
    until = time.monotonic() + PATIENCE_S
    while not glob.glob(str(tmp_path / "q.partial-*" / "model.safetensors")):
        assert q.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    assert not os.path.exists(tmp_path / "q")
    q.send_signal(sent)
    stderr = q.communicate()[1]
    assert q.returncode == 1 and stderr.count("\n") == 1, stderr
    assert "q was not written" in stderr and os.listdir(tmp_path) == []
    os.close(terminal)
    os.close(reader)
