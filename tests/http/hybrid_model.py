"""Hybrids with random weights and the bundled model's tokenizer, for tests that need texts and no sense in them."""
import array
import json
import os
import random
import shutil

from conftest import ROOT

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 32, 4, 2, 16, 48
LAYERS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
DELTA = dict(heads=4, groups=2, key=8, value=8, kernel=4)
SSD = dict(heads=4, groups=2, key=12, value=16, kernel=3)  # values: mamba_expand * hidden


def qwen35_tensors():
    keys, values, heads = DELTA["groups"] * DELTA["key"], DELTA["heads"] * DELTA["value"], DELTA["heads"]
    channels = 2 * keys + values
    yield from ends("model.norm.weight")
    for i, kind in enumerate(LAYERS):
        at = f"model.layers.{i}."
        yield from ((at + "input_layernorm.weight", [HIDDEN]), (at + "post_attention_layernorm.weight", [HIDDEN]))
        yield from mlp(at + "mlp.")
        if kind == "full_attention":
            yield from attention(at + "self_attn.", 2)
            yield from ((at + f"self_attn.{n}_norm.weight", [HEAD_DIM]) for n in "qk")
        else:
            at += "linear_attn."
            yield from ((at + f"in_proj_{n}.weight", [rows, HIDDEN])
                        for n, rows in (("qkv", channels), ("z", values), ("b", heads), ("a", heads)))
            yield from recurrence(at, channels, heads, values, DELTA["kernel"], DELTA["value"])


def bamba_tensors(groups=SSD["groups"]):
    values, heads = SSD["heads"] * SSD["value"], SSD["heads"]
    channels = values + 2 * groups * SSD["key"]
    yield from ends("model.final_layernorm.weight")
    for i, kind in enumerate(LAYERS):
        at = f"model.layers.{i}."
        yield from ((at + "input_layernorm.weight", [HIDDEN]), (at + "pre_ff_layernorm.weight", [HIDDEN]))
        yield from mlp(at + "feed_forward.")
        if kind == "full_attention":
            yield from attention(at + "self_attn.", 1)
        else:
            at += "mamba."
            yield from ((at + "in_proj.weight", [values + channels + heads, HIDDEN]), (at + "D", [heads]),
                        (at + "conv1d.bias", [channels]))
            yield from recurrence(at, channels, heads, values, SSD["kernel"], values)


def granite_tensors():
    """Bamba's layers with one group, and with experts, and one that all tokens have, in place of the MLP."""
    width, shared, n = GRANITE["intermediate_size"], GRANITE["shared_intermediate_size"], GRANITE["num_local_experts"]
    names = {"feed_forward": None, "pre_ff_layernorm": "post_attention_layernorm", "final_layernorm": "norm"}
    for name, shape in bamba_tensors(GRANITE["mamba_n_groups"]):
        old = next((k for k in names if k in name), None)
        if old is None or names[old]:
            yield (name.replace(old, names[old]) if old else name), shape
    for i in range(len(LAYERS)):
        at = f"model.layers.{i}."
        yield from ((at + "block_sparse_moe.router.layer.weight", [n, HIDDEN]),
                    (at + "block_sparse_moe.input_linear.weight", [n, 2 * width, HIDDEN]),
                    (at + "block_sparse_moe.output_linear.weight", [n, HIDDEN, width]),
                    (at + "shared_mlp.input_linear.weight", [2 * shared, HIDDEN]),
                    (at + "shared_mlp.output_linear.weight", [HIDDEN, shared]))


def falcon_tensors():
    """Attention and a recurrence in each layer."""
    values, heads = SSD["heads"] * SSD["value"], SSD["heads"]
    channels = values + 2 * SSD["groups"] * SSD["key"]
    yield from ends("model.final_layernorm.weight")
    for i in range(FALCON["num_hidden_layers"]):
        at = f"model.layers.{i}."
        yield from ((at + "input_layernorm.weight", [HIDDEN]), (at + "pre_ff_layernorm.weight", [HIDDEN]))
        yield from mlp(at + "feed_forward.")
        yield from attention(at + "self_attn.", 1)
        at += "mamba."
        yield from ((at + "in_proj.weight", [values + channels + heads, HIDDEN]), (at + "D", [heads]),
                    (at + "conv1d.bias", [channels]))
        yield from (pair for pair in recurrence(at, channels, heads, values, SSD["kernel"], values) if "norm" not in pair[0])


def nemotron_tensors():
    """Each layer a recurrence, attention, an MLP or experts."""
    values, heads, width = SSD["heads"] * SSD["value"], SSD["heads"], NEMOTRON["moe_intermediate_size"]
    channels = values + 2 * SSD["groups"] * SSD["key"]
    yield from ((name.replace("model.embed_tokens", "backbone.embeddings"), shape) for name, shape in ends("backbone.norm_f.weight"))
    for i, kind in enumerate(NEMOTRON["layer_types"]):
        yield f"backbone.layers.{i}.norm.weight", [HIDDEN]
        at = f"backbone.layers.{i}.mixer."
        if kind == "full_attention":
            yield from attention(at, 1)
        elif kind == "linear_attention":
            yield from ((at + "in_proj.weight", [values + channels + heads, HIDDEN]), (at + "D", [heads]),
                        (at + "conv1d.bias", [channels]))
            yield from recurrence(at, channels, heads, values, SSD["kernel"], values)
        elif kind == "mlp":
            yield from list(mlp(at))[1:]
        else:
            n = NEMOTRON["n_routed_experts"]
            yield from ((at + "gate.weight", [n, HIDDEN]), (at + "gate.e_score_correction_bias", [n]))
            for part in ["shared_experts"] + [f"experts.{e}" for e in range(n)]:
                yield from ((f"{at}{part}.up_proj.weight", [width, HIDDEN]), (f"{at}{part}.down_proj.weight", [HIDDEN, width]))


def lfm2_tensors():
    """Short convolutions and attention, experts behind the first layer."""
    n, width = LFM2["num_experts"], LFM2["moe_intermediate_size"]
    yield from ends("model.embedding_norm.weight")
    for i, kind in enumerate(LFM2["layer_types"]):
        at = f"model.layers.{i}."
        yield from ((at + "operator_norm.weight", [HIDDEN]), (at + "ffn_norm.weight", [HIDDEN]))
        if kind == "full_attention":
            yield from ((name.replace("o_proj", "out_proj"), shape) for name, shape in attention(at + "self_attn.", 1))
            yield from ((at + f"self_attn.{n}_layernorm.weight", [HEAD_DIM]) for n in "qk")
        else:
            yield from ((at + "conv.in_proj.weight", [3 * HIDDEN, HIDDEN]), (at + "conv.conv.weight", [HIDDEN, 1, LFM2["conv_L_cache"]]),
                        (at + "conv.out_proj.weight", [HIDDEN, HIDDEN]))
        at += "feed_forward."
        if i > 0:
            yield from ((at + "gate.weight", [n, HIDDEN]), (at + "expert_bias", [n]))
        for part, rows in [("", MLP)] if i == 0 else [(f"experts.{e}.", width) for e in range(n)]:
            yield from ((at + part + "w1.weight", [rows, HIDDEN]), (at + part + "w3.weight", [rows, HIDDEN]),
                        (at + part + "w2.weight", [HIDDEN, rows]))


def jamba_tensors():
    """Mamba-1 and attention, experts in every second layer."""
    n, values, rank, key = JAMBA["num_experts"], 2 * HIDDEN, JAMBA["mamba_dt_rank"], JAMBA["mamba_d_state"]
    yield from ends("model.final_layernorm.weight")
    for i, kind in enumerate(LAYERS):
        at = f"model.layers.{i}."
        yield from ((at + "input_layernorm.weight", [HIDDEN]), (at + "pre_ff_layernorm.weight", [HIDDEN]))
        if i % 2 == 1:
            yield at + "feed_forward.router.weight", [n, HIDDEN]
        for part in [f"experts.{e}." for e in range(n)] if i % 2 == 1 else [""]:
            yield from mlp(at + "feed_forward." + part)
        if kind == "full_attention":
            yield from attention(at + "self_attn.", 1)
            continue
        at += "mamba."
        yield from ((at + "in_proj.weight", [2 * values, HIDDEN]), (at + "x_proj.weight", [rank + 2 * key, values]),
                    (at + "conv1d.weight", [values, 1, 3]), (at + "conv1d.bias", [values]), (at + "D", [values]),
                    (at + "dt_proj.weight", [values, rank]), (at + "dt_proj.bias", [values]), (at + "A_log", [values, key]),
                    (at + "dt_layernorm.weight", [rank]), (at + "b_layernorm.weight", [key]), (at + "c_layernorm.weight", [key]),
                    (at + "out_proj.weight", [HIDDEN, values]))


def ends(norm):
    vocab = demo_config()["vocab_size"]
    yield from (("model.embed_tokens.weight", [vocab, HIDDEN]), (norm, [HIDDEN]), ("lm_head.weight", [vocab, HIDDEN]))


def mlp(at):
    yield from ((at + "gate_proj.weight", [MLP, HIDDEN]), (at + "up_proj.weight", [MLP, HIDDEN]),
                (at + "down_proj.weight", [HIDDEN, MLP]))


def attention(at, per_q):
    rows = {"q": per_q * HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    yield from ((at + f"{n}_proj.weight", [rows[n], HIDDEN]) for n in "qkv")
    yield at + "o_proj.weight", [HIDDEN, HEADS * HEAD_DIM]


def recurrence(at, channels, heads, values, kernel, norm):
    yield from ((at + "conv1d.weight", [channels, 1, kernel]), (at + "A_log", [heads]), (at + "dt_bias", [heads]),
                (at + "norm.weight", [norm]), (at + "out_proj.weight", [HIDDEN, values]))


SSD_CONFIG = {"mamba_n_heads": SSD["heads"], "mamba_n_groups": SSD["groups"], "mamba_d_state": SSD["key"],
              "mamba_d_head": SSD["value"], "mamba_d_conv": SSD["kernel"], "mamba_expand": 2}
GRANITE = {"mamba_n_groups": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16,
           "shared_intermediate_size": 24, "embedding_multiplier": 3.0, "attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 0.5}
FALCON = {"num_hidden_layers": 2, "layer_types": None, "rope_theta": 10000.0, "embedding_multiplier": 3.0, "key_multiplier": 0.75,
          "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6,
          "ssm_multipliers": [0.7, 1.1, 0.9, 1.3, 0.8], "mlp_multipliers": [0.8, 0.6], "lm_head_multiplier": 2.0}
NEMOTRON = {"layer_types": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp", "linear_attention", "moe"],
            "num_hidden_layers": 7, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16, "routed_scaling_factor": 1.5, "mlp_hidden_act": "relu2"}
LFM2 = {"layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3, "num_dense_layers": 1, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 18, "rope_theta": 10000.0}
JAMBA = {"num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_conv": 3,
         "mamba_d_state": 6, "mamba_dt_rank": 5}
CONFIGS = {
    "qwen35": ("Qwen3_5ForCausalLM", qwen35_tensors,
               {"linear_num_value_heads": DELTA["heads"], "linear_num_key_heads": DELTA["groups"],
                "linear_key_head_dim": DELTA["key"], "linear_value_head_dim": DELTA["value"],
                "linear_conv_kernel_dim": DELTA["kernel"]}),
    "bamba": ("BambaForCausalLM", bamba_tensors, SSD_CONFIG),
    "falcon": ("FalconH1ForCausalLM", falcon_tensors, SSD_CONFIG | FALCON),
    "nemotron": ("NemotronHForCausalLM", nemotron_tensors, SSD_CONFIG | NEMOTRON),
    "lfm2": ("Lfm2MoeForCausalLM", lfm2_tensors, LFM2),
    "jamba": ("JambaForCausalLM", jamba_tensors, JAMBA),
    "granite": ("GraniteMoeHybridForCausalLM", granite_tensors, SSD_CONFIG | GRANITE),
}


def demo_config():
    with open(os.path.join(ROOT, "models", "demo", "config.json"), encoding="utf-8") as f:
        return json.load(f)


def write_safetensors(path, tensors, rng, zeros=None):
    """Random values; those of tensors whose names end in `zeros` are 0."""
    header, values = {}, array.array("f")
    for name, shape in tensors:
        n, first = 1, 4 * len(values)
        for size in shape:
            n *= size
        base = 1.0 if "norm" in name else 0.0
        scale = 0.3 if len(shape) == 1 else 1.4 / shape[-1] ** 0.5
        scale *= not (zeros and name.endswith(zeros))
        values.extend(base + scale * rng.gauss(0, 1) for _ in range(n))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [first, 4 * len(values)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + values.tobytes())


def make(made, kind, positions=2048):
    """A model's folder in `made`."""
    demo, (architecture, tensors, more) = os.path.join(ROOT, "models", "demo"), CONFIGS[kind]
    for name in os.listdir(demo):
        if name.startswith("tokenizer"):
            shutil.copy(os.path.join(demo, name), made / name)
    old = demo_config()
    config = {key: old[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")} | {
        "architectures": [architecture], "hidden_size": HIDDEN, "num_hidden_layers": len(LAYERS), "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": MLP, "rms_norm_eps": 1e-5,
        "max_position_embeddings": positions, "layer_types": LAYERS, "tie_word_embeddings": False, "dtype": "float32"} | more
    (made / "config.json").write_text(json.dumps(config))
    write_safetensors(made / "model.safetensors", tensors(), random.Random(kind))
    return str(made)


def wrap(made, architecture, kind):
    """Turn the model in `made` into the text part of one that sees, with a tensor of a vision tower beside it."""
    config = json.loads((made / "config.json").read_text())
    text = {key: value for key, value in config.items() if key not in ("architectures", "tie_word_embeddings")}
    (made / "config.json").write_text(json.dumps({"architectures": [architecture], "tie_word_embeddings": False,
                                                  "text_config": text, "vision_config": {"hidden_size": 8}}))
    renamed = ((name.replace("model.", "model.language_model.", 1), shape) for name, shape in CONFIGS[kind][1]())
    tower = ("model.visual.blocks.0.mlp.linear_fc1.weight", [8, 8])
    write_safetensors(made / "model.safetensors", [*renamed, tower], random.Random(kind))
