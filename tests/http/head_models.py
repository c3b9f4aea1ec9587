"""Draft heads for tests: EAGLE-3 heads of random weights for the bundled model, and small
models of dummy weights (--load-format dummy), some with an MTP head, that have the
bundled model's tokenizer."""
import json
import pathlib
import shutil
import struct

import numpy as np

from conftest import ROOT

DEMO = f"{ROOT}/models/demo"
GOLDEN = f"{ROOT}/tests/golden"
HEADS = f"{GOLDEN}/heads"
MTP = ("mtp-glm", "mtp-latent", "mtp-qwen")
DENSE = (
    "big-code",
    "falcon",
    "falcon-norms",
    "gpt-neox",
    "gptj",
    "internlm2",
    "nemotron",
    "phi",
    "starcoder2-window",
)
# Goldens' architectures with experts, latents, recurrent states, or caches of several kinds,
# and the sizes that every quantization, and two ranks with most of them, divide. The state of
# a recurrent layer fits into the keys and values of 48 tokens of 16 bits.
MIXED = {
    "deepseek-v2-groups": {"moe_intermediate_size": 64},
    "falcon-h1": {"mamba_d_ssm": 64, "mamba_d_head": 16},
    "gemma4-inputs": {
        "head_dim": 64,
        "global_head_dim": 128,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 4096,
    },
    "gemma4-moe": {"head_dim": 64, "global_head_dim": 128, "moe_intermediate_size": 64},
    "gpt-oss": {"head_dim": 64},
    "granite-hybrid-moe": {
        "mamba_d_state": 8,
        "mamba_expand": 1,
        "mamba_n_heads": 8,
        "shared_intermediate_size": 64,
    },
    "jamba": {},
    "lfm2-moe": {"moe_intermediate_size": 64},
    "llama4": {"attention_chunk_size": 24, "head_dim": 64, "intermediate_size_mlp": 128},
    "nemotron-h-moe": {
        "head_dim": 64,
        "mamba_head_dim": 32,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
    },
    "qwen3-moe": {"head_dim": 64, "moe_intermediate_size": 64},
    "qwen3-next": {
        "head_dim": 64,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
}
RECURRENT = ("falcon-h1", "granite-hybrid-moe", "jamba", "lfm2-moe", "nemotron-h-moe", "qwen3-next")
EXPERTS = tuple(k for k in MIXED if k not in ("falcon-h1", "gemma4-inputs"))
HEAD_DIM, N_HEADS, N_KV_HEADS, MLP = 32, 4, 2, 64


def write_safetensors(path, tensors):
    header, at = {}, 0
    for name, t in tensors.items():
        header[name] = {
            "dtype": {"float32": "F32", "int64": "I64"}[str(t.dtype)],
            "shape": t.shape,
            "data_offsets": [at, at + t.nbytes],
        }
        at += t.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(t.tobytes() for t in tensors.values())
    )


def head_tensors(hidden, ids, seed=3):
    rng = np.random.default_rng(seed)
    shapes = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (len(ids), hidden),
        "midlayer.self_attn.q_proj": (N_HEADS * HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.k_proj": (N_KV_HEADS * HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.v_proj": (N_KV_HEADS * HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, N_HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj": (MLP, hidden),
        "midlayer.mlp.up_proj": (MLP, hidden),
        "midlayer.mlp.down_proj": (hidden, MLP),
    }
    tensors = {
        f"{name}.weight": (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }
    norms = (
        "norm",
        "midlayer.input_layernorm",
        "midlayer.hidden_norm",
        "midlayer.post_attention_layernorm",
    )
    tensors |= {f"{name}.weight": np.ones(hidden, np.float32) for name in norms}
    tensors["d2t"] = np.array(ids, np.int64) - np.arange(len(ids))
    return tensors


def write_eagle3(folder, ids, parallel=False):
    """An EAGLE-3 head for the bundled model that drafts the tokens `ids`, ascending, alone; `parallel`: a P-EAGLE head."""
    model = json.loads(pathlib.Path(DEMO, "config.json").read_text())
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(ids),
        "num_hidden_layers": 1,
        "hidden_size": model["hidden_size"],
        "num_attention_heads": N_HEADS,
        "num_key_value_heads": N_KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": MLP,
        "vocab_size": model["vocab_size"],
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
    }
    tensors = head_tensors(model["hidden_size"], ids)
    if parallel:
        config |= {"ptd_token_id": 7, "parallel_drafting": True}
        width = 3 * model["hidden_size"]
        rng = np.random.default_rng(5)
        tensors["mask_hidden"] = rng.standard_normal((1, 1, width)).astype(np.float32)
    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def write_dummy(folder, config):
    """The files of a model of dummy weights: the configuration, with room for texts."""
    folder = pathlib.Path(folder)
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{DEMO}/{name}", folder)
    positions = "n_positions" if "n_positions" in config else "max_position_embeddings"
    room = {"vocab_size": 4096, positions: 1024, "bos_token_id": 0, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config | room))
    return folder


def write_mtp(folder, kind, **members):
    """A model of dummy weights with an MTP head; kind: one of MTP."""
    config = json.loads(pathlib.Path(HEADS, kind, "config.json").read_text())
    if "num_experts" in config:
        config["num_experts"] = 6  # which two ranks divide
    return write_dummy(folder, config | members)


def write_dense(folder, kind):
    """A model of dummy weights of one of the DENSE goldens' architectures, in sizes that
    two ranks and every quantization divide."""
    sizes = {
        "hidden_size": 64,
        "n_embd": 64,
        "num_attention_heads": 4,
        "n_head": 4,
        "intermediate_size": 128,
    }
    config = json.loads(pathlib.Path(GOLDEN, kind, "config.json").read_text())
    return write_dummy(folder, config | {k: v for k, v in sizes.items() if k in config})


def write_mixed(folder, kind):
    """A model of dummy weights of one of the MIXED goldens' architectures."""
    config = json.loads(pathlib.Path(GOLDEN, kind, "config.json").read_text())
    return write_dummy(folder, config | {"hidden_size": 64, "intermediate_size": 256} | MIXED[kind])
