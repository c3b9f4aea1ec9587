"""Attention over latents, and layers of experts: however a text comes about, its ids are the same."""
import functools
import json
import os
import random
import shutil

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
