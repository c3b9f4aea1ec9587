"""Attention over latents, and layers of experts: however a text comes about, its ids are the same."""
import functools
import json
import os
import random
import re
import shutil

import numpy as np
import pytest

import hybrid_model
import test_experts
from company import DEVICE, ON, ask_all, ask_crowd_apart, ask_each, check_company
from conftest import ROOT, serving

COMMON = (*ON, "--threads", "1", "--block-size", "4", "--max-num-seqs", "8", "--max-num-batched-tokens", "48")
HIDDEN, HEADS, MLP, LAYERS = 32, 4, 48, 3
LATENT = {"kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 14}
EXPERTS = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_group": 4,
           "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True}


def tensors():
    """DeepSeek-V3: latents in every layer, experts behind the first."""
    rank, rotated = LATENT["kv_lora_rank"], LATENT["qk_rope_head_dim"]
    nope, value, q_rank = LATENT["qk_nope_head_dim"], LATENT["v_head_dim"], LATENT["q_lora_rank"]
    n, width = EXPERTS["n_routed_experts"], EXPERTS["moe_intermediate_size"]
    yield from hybrid_model.ends("model.norm.weight")
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        yield from ((at + f"{norm}_layernorm.weight", [HIDDEN]) for norm in ("input", "post_attention"))
        yield from ((at + "self_attn." + name, shape) for name, shape in (
            ("q_a_proj.weight", [q_rank, HIDDEN]), ("q_a_layernorm.weight", [q_rank]),
            ("q_b_proj.weight", [HEADS * (nope + rotated), q_rank]), ("kv_a_proj_with_mqa.weight", [rank + rotated, HIDDEN]),
            ("kv_a_layernorm.weight", [rank]), ("kv_b_proj.weight", [HEADS * (nope + value), rank]),
            ("o_proj.weight", [HIDDEN, HEADS * value])))
        at += "mlp."
        if i > 0:
            yield from ((at + "gate.weight", [n, HIDDEN]), (at + "gate.e_score_correction_bias", [n]))
        for part, rows in [("", MLP)] if i == 0 else [(f"experts.{e}.", width) for e in range(n)] + [("shared_experts.", width)]:
            yield from ((at + part + "gate_proj.weight", [rows, HIDDEN]), (at + part + "up_proj.weight", [rows, HIDDEN]),
                        (at + part + "down_proj.weight", [HIDDEN, rows]))


def make(made):
    demo, old = os.path.join(ROOT, "models", "demo"), hybrid_model.demo_config()
    for name in os.listdir(demo):
        if name.startswith("tokenizer"):
            shutil.copy(os.path.join(demo, name), made / name)
    config = {key: old[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")} | {
        "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "intermediate_size": MLP, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": False, "dtype": "float32"}
    (made / "config.json").write_text(json.dumps(config | LATENT | EXPERTS))
    hybrid_model.write_safetensors(made / "model.safetensors", tensors(), random.Random(13))
    return str(made)


@pytest.fixture(scope="module", params=["latents", "experts"])
def folder(tmp_path_factory, request):
    made = tmp_path_factory.mktemp(request.param)
    return make(made) if request.param == "latents" else test_experts.make(made, 2)


@functools.cache
def alone(folder):
    """Each answer, and each of the crowd's, one after the other, without cached prefixes."""
    with serving(*COMMON, "--kv-blocks", "2000", "--no-prefix-cache", model=folder) as server:
        return ask_each(server), ask_crowd_apart(server)


@pytest.mark.parametrize("flags", [
    ("--kv-blocks", "2000"),
    ("--kv-blocks", "2000", "--max-num-batched-tokens", "9"),
    ("--kv-blocks", "72", "--preemption", "recompute"),
    ("--kv-blocks", "72", "--preemption", "swap", "--swap-space", "64MiB"),
    ("--kv-blocks", "72", "--preemption", "recompute", "--no-prefix-cache"),
], ids=["roomy", "small steps", "recompute", "swap", "no cache"])
def test_texts_do_not_depend_on_their_company(folder, flags):
    want, crowd = alone(folder)
    with serving(*COMMON, *flags, model=folder) as server:
        check_company(server, want, crowd, rounds=2, preempts=flags[1] != "2000")
        if "--no-prefix-cache" not in flags:
            assert server.metric("prefix_cache_hits_total") > 0


@pytest.mark.skipif(DEVICE != "cpu", reason="takes several devices")
@pytest.mark.parametrize("division", ["tensor", "pipeline"])
def test_each_division_answers_alone_and_in_company(folder, division):
    flags = ("--kv-blocks", "72", f"--{division}-parallel-size", "2")
    with serving(*COMMON, *flags, model=folder) as server:
        want = ask_each(server)
        assert ask_all(server, 2) == want * 2


# ---- as DeepSeek-V3, R1 and Kimi-K2 are published: fp8 in blocks ----

BLOCK = 16


def e4m3_values():
    """Of the codes 0 to 126."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    return np.where(exponent == 0, mantissa * 2.0 ** -9, (8 + mantissa) * 2.0 ** (exponent - 10.0))


def in_blocks(w):
    """Codes and scales of a matrix, and the values that they stand for."""
    values = e4m3_values()
    rows, cols = (-(-n // BLOCK) for n in w.shape)
    scale = np.array([[np.abs(w[r * BLOCK:(r + 1) * BLOCK, c * BLOCK:(c + 1) * BLOCK]).max() / 448 for c in range(cols)]
                      for r in range(rows)], np.float32)
    each = scale.repeat(BLOCK, 0)[:w.shape[0]].repeat(BLOCK, 1)[:, :w.shape[1]]
    code = np.searchsorted((values[1:] + values[:-1]) / 2, np.abs(w) / each)
    return (np.where(w < 0, code | 128, code).astype(np.uint8), scale,
            (np.where(w < 0, -1, 1) * values[code] * each).astype(np.float32))


def write_both(source, stored, decoded):
    """The model of `source` with its linear layers in fp8, and with what they decode to."""
    data = (source / "model.safetensors").read_bytes()
    n = int.from_bytes(data[:8], "little")
    codes, floats = {}, {}
    for name, t in json.loads(data[8:8 + n]).items():
        begin, end = (8 + n + at for at in t["data_offsets"])
        floats[name] = np.frombuffer(data[begin:end], np.float32).reshape(t["shape"])
        codes[name] = floats[name]
        if name.endswith("_proj.weight") or name.endswith("_mqa.weight"):
            codes[name], codes[name + "_scale_inv"], floats[name] = in_blocks(floats[name])
    config = json.loads((source / "config.json").read_text())
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    for made, tensors, more in ((stored, codes, {"quantization_config": quantization}), (decoded, floats, {})):
        shutil.copytree(source, made, ignore=shutil.ignore_patterns("*.safetensors"))
        (made / "config.json").write_text(json.dumps(config | more))
        head, at = {}, 0
        for name, x in tensors.items():
            head[name] = {"dtype": "F8_E4M3" if x.dtype == np.uint8 else "F32", "shape": list(x.shape),
                          "data_offsets": [at, at + x.nbytes]}
            at += x.nbytes
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % 8)
        (made / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text
                                                 + b"".join(x.tobytes() for x in tensors.values()))


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    at = tmp_path_factory.mktemp("blocks")
    (at / "source").mkdir()
    make(at / "source")
    write_both(at / "source", at / "stored", at / "decoded")
    return str(at / "stored"), str(at / "decoded")


@pytest.mark.skipif(DEVICE != "cpu", reason="tells what a CPU multiplies")
def test_fp8_in_blocks_is_served_as_what_it_decodes_to(blocks, start):
    """Products by head read views of decoded rows; all others multiply codes, cut blocks included."""
    stored, decoded = blocks
    log = start(*COMMON, model=stored).log
    assert re.search(r"\d+ of FP8 by", log) and "6 of FP8 decoded to float32 (a product by heads)" in log, log
    want, got = (test_experts.logprobs(folder) for folder in (decoded, stored))
    assert max(abs(a - b) for a, b in zip(want, got, strict=True)) < 0.002


@pytest.mark.skipif(DEVICE != "cpu", reason="takes several devices")
def test_ranks_that_cut_blocks_of_fp8_are_refused_by_name(blocks, start):
    server = start(*COMMON, "--tensor-parallel-size", "2", model=blocks[0], wait=False)
    assert server.process.wait(60) == 1
    lines = [x for x in server.log.splitlines() if "cannot start" in x]
    assert len(lines) == 1 and "q_b_proj" in lines[0], server.log
