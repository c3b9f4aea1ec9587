"""Quantised weights as Quire decodes them, bit for bit those of the formats' own decoders: what `quire quantize` writes of
dense models and of experts, and the goldens of every stored format. Each test needs the decoder's package, and is left out
where that is missing; hashes that the same decoders made stand in tests/golden, which unit tests compare everywhere."""
import json
import pathlib
import subprocess

import numpy as np
import pytest
from conftest import QUIRE, ROOT

GOLDEN = pathlib.Path(ROOT) / "tests" / "golden"
DEMO = pathlib.Path(ROOT) / "models" / "demo"
TOOL = pathlib.Path(QUIRE).parent / "tests" / "tools" / "decoded"  # make tools
EXPERTS = ("qwen3-moe", "gpt-oss", "qwen3-vl-moe", "granite-moe", "gemma4-moe", "deepseek-v3-even")
FORMATS = ("fp8", "int8", "int8-asymmetric", "int4", "int4-asymmetric", "nvfp4", "mxfp4")
CALIBRATED = ("fp8-static", "int8-static", "int8-smooth", "int8-search", "int4-asymmetric-search")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # in a word, of eight neighbours


def decoded(model, out):
    """name -> values, by Quire."""
    done = subprocess.run([TOOL, model, out], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    values, at, tensors = np.fromfile(out, np.float32), 0, {}
    for line in done.stdout.splitlines():
        name, *sizes = line.split(" ")
        shape = [int(n) for n in sizes]
        tensors[name] = values[at:at + int(np.prod(shape))].reshape(shape)
        at += tensors[name].size
    assert at == values.size and tensors
    return tensors


def same_bits(mine, theirs, name):
    x, y = (np.ascontiguousarray(v, np.float32).view(np.uint32) for v in (mine, theirs))
    assert x.shape == y.shape, name
    where = np.argwhere(x != y)
    assert not where.size, f"{name}: {len(where)} of {x.size} differ, the first at {where[0]}"


def compare(mine, theirs):
    assert set(mine) == set(theirs)
    for name, values in theirs.items():
        same_bits(mine[name], values, name)


def stored(directory):
    safetensors = pytest.importorskip("safetensors.torch")
    return safetensors.load_file(directory / "model.safetensors")


# ---- compressed-tensors ----

def nvfp4(parts):
    """By the package's functions, which its decoder calls with bfloat16."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    import torch
    rows, half = parts["weight_packed"].shape
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    codes = unpack_fp4_from_uint8(parts["weight_packed"], rows, 2 * half, dtype=torch.float32)
    return dequantize(x_q=codes, scale=parts["weight_scale"].float(), args=args,
                      global_scale=parts["weight_global_scale"], dtype=torch.float32)


def of_compressed_tensors(directory):
    """name -> values of the quantised weights, by that package."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    decoder = BaseCompressor.get_value_from_registry(group.get("format") or config["format"])
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**group["weights"]))
    tensors, out = stored(directory), {}
    for name in [k[:-len("weight_scale")] for k in tensors if k.endswith(".weight_scale")]:
        parts = {k[len(name):]: v for k, v in tensors.items() if k.startswith(name + "weight")}
        if "weight_global_scale" in parts:
            out[name + "weight"] = nvfp4(parts).numpy()
            continue
        if parts["weight_scale"].dtype != torch.uint8:  # the type that it decodes to
            parts["weight_scale"] = parts["weight_scale"].float()
        out[name + "weight"] = decoder.decompress(parts, scheme)["weight"].float().numpy()
    return out


def quantize(source, target, way, text):
    form, *options = way.split("-")
    run = [QUIRE, "quantize", source, target, "--format", form]
    for o in options:
        run += ["--" + o, "0.5"] if o == "smooth" else ["--" + o]
    run += ["--text", text] if {"static", "smooth", "search"} & set(options) else []
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text("One day a little girl found a red ball under the big tree in the park. " * 20)
    return path


@pytest.mark.parametrize("way", (*FORMATS, *CALIBRATED))
def test_what_quantize_writes_of_a_dense_model(tmp_path, text, way):
    pytest.importorskip("compressed_tensors")
    quantize(DEMO, tmp_path / "to", way, text)
    mine = decoded(tmp_path / "to", tmp_path / "values")
    assert len(mine) == 56
    compare(mine, of_compressed_tensors(tmp_path / "to"))


def compare_experts(source, tmp_path, way, text):
    quantize(source, tmp_path / "to", way, text)
    mine = decoded(tmp_path / "to", tmp_path / "values")
    assert any(".experts." in name for name in mine)
    compare(mine, of_compressed_tensors(tmp_path / "to"))


@pytest.mark.parametrize("way", [way for way in FORMATS if "8" in way])
@pytest.mark.parametrize("source", EXPERTS)
def test_what_quantize_writes_of_experts(tmp_path, text, source, way):
    pytest.importorskip("compressed_tensors")
    compare_experts(GOLDEN / source, tmp_path, way, text)


@pytest.fixture(scope="module", params=("Qwen3Moe", "GptOss", "Mixtral"))
def wide_experts(request, tmp_path_factory):
    """A directory of random experts whose columns are groups of 32, one by one or stacked."""
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    sizes = {"vocab_size": 67, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4,
             "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
             "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2}
    if request.param == "GptOss":
        sizes.update(layer_types=["full_attention"])
    torch.manual_seed(3)
    config = getattr(transformers, request.param + "Config")(**sizes)
    model = getattr(transformers, request.param + "ForCausalLM")(config).to(torch.bfloat16)
    path = tmp_path_factory.mktemp("experts") / request.param
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("way", [way for way in FORMATS if "4" in way])
def test_what_quantize_writes_of_experts_in_groups(tmp_path, text, wide_experts, way):
    pytest.importorskip("compressed_tensors")
    compare_experts(wide_experts, tmp_path, way, text)


@pytest.mark.parametrize("golden", sorted(p.name for p in GOLDEN.glob("quant-ct-*")))
def test_files_of_compressed_tensors(tmp_path, golden):
    if golden.endswith("act-order"):  # of older versions of the package
        pytest.skip("this version of compressed-tensors reads no order of columns")
    theirs = of_compressed_tensors(GOLDEN / golden)
    compare(decoded(GOLDEN / golden, tmp_path / "values"), theirs)


# ---- the formulas of AutoGPTQ, AutoAWQ, ModelOpt and transformers ----

def fields(words, bits, axis):
    """The numbers of so many bits in int32, the lowest first, along an axis."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words = np.expand_dims(words.numpy().view(np.uint32), axis + 1)
    shape = [1] * words.ndim
    shape[axis + 1] = len(shifts)
    x = (words >> shifts.reshape(shape)) & np.uint32(2**bits - 1)
    return x.reshape([n * len(shifts) if i == axis else n
                      for i, n in enumerate(np.squeeze(words, axis + 1).shape)]).astype(np.int32)


def gptq(parts, config):
    bits = config["bits"]
    q, z = fields(parts["qweight"], bits, 0), fields(parts["qzeros"], bits, 1)
    if config.get("checkpoint_format") != "gptq_v2":
        z = (z + 1) & (2**bits - 1)
    group = parts["g_idx"].numpy()
    return ((q - z[group]) * parts["scales"].float().numpy()[group]).T


def awq(parts, config):
    def in_order(x):
        return x.reshape(x.shape[0], -1, 8)[:, :, AWQ_PLACES].reshape(x.shape)
    q, z = (in_order(fields(parts[k], 4, 1)) for k in ("qweight", "qzeros"))
    group = np.arange(q.shape[0]) // config["group_size"]
    return ((q - z[group]) * parts["scales"].float().numpy()[group]).T


def spread(scale, shape, block):
    rows, cols = block or shape
    return scale.repeat(rows, 0)[:shape[0]].repeat(cols, 1)[:, :shape[1]]


def fp8(parts, config):
    w = parts["weight"].float().numpy()
    scale = parts.get("weight_scale_inv", parts.get("weight_scale")).float().numpy()
    return w * spread(scale.reshape(scale.shape or (1, 1)), w.shape,
                      config.get("weight_block_size"))


def modelopt(parts, config):
    if "weight_scale_2" not in parts:
        return fp8(parts, {})
    codes = parts["weight"].numpy()
    values = E2M1[np.stack([codes & 15, codes >> 4], 2).reshape(codes.shape[0], -1)]
    scale = parts["weight_scale"].float().numpy() * parts["weight_scale_2"].float().numpy()
    return values * scale.repeat(16, 1)


BY_FORMULA = {"gptq": (gptq, ".qweight"), "awq": (awq, ".qweight"), "fp8": (fp8, ".weight"),
              "modelopt": (modelopt, ".weight")}


@pytest.mark.parametrize("golden", sorted(p.name for p in GOLDEN.glob("quant-*")
                                          if not p.name.startswith("quant-ct-")
                                          and p.name != "quant-mxfp4-experts"))
def test_files_by_formula(tmp_path, golden):
    pytest.importorskip("torch")
    directory = GOLDEN / golden
    config = json.loads((directory / "config.json").read_text()).get("quantization_config",
                                                                      {"quant_method": "modelopt"})
    formula, ending = BY_FORMULA[config["quant_method"]]
    tensors, theirs = stored(directory), {}
    for module in [k[:-len(ending)] for k in tensors if k.endswith(ending)]:
        parts = {k[len(module) + 1:]: v for k, v in tensors.items()
                 if k.rsplit(".", 1)[0] == module}
        if any("scale" in k for k in parts):
            theirs[module + ".weight"] = formula(parts, config)
    compare(decoded(directory, tmp_path / "values"), theirs)


def test_mxfp4_of_stacked_experts(tmp_path):
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    directory = GOLDEN / "quant-mxfp4-experts"
    tensors = stored(directory)
    theirs = {k[:-len("_blocks")]: mxfp4.convert_moe_packed_tensors(
        v, tensors[k[:-len("blocks")] + "scales"], dtype=torch.float32).numpy()
              for k, v in tensors.items() if k.endswith("_blocks")}
    compare(decoded(directory, tmp_path / "values"), theirs)


# ---- GGUF ----

@pytest.mark.parametrize("golden", ("gguf-blocks", "gguf-k-blocks", "gguf-experts"))
def test_files_of_gguf(tmp_path, golden):
    gguf = pytest.importorskip("gguf")
    path = GOLDEN / golden / "model.gguf"
    mine = decoded(path, tmp_path / "values")
    theirs = {t.name: gguf.dequantize(t.data, t.tensor_type).reshape(mine[t.name].shape)
              for t in gguf.GGUFReader(path).tensors}
    compare(mine, theirs)
