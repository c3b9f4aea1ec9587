"""The bundled model with quantised weights, for servers of the random combinations: as a GGUF
file, and as what `quire quantize` writes."""
import json
import os
import struct
import subprocess

import numpy as np

from conftest import QUIRE

ALIGNMENT = 32
F32, Q4_0, Q8_0, Q4_K = 0, 2, 8, 12
U32, I32, FLOAT, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
TOKEN_NORMAL, TOKEN_CONTROL = 1, 3
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
BLOCKS = ("q4_0", "q8_0", "q4_k")
GROUPS = ("int4", "int4 --asymmetric", "mxfp4", "nvfp4", "int8", "fp8")


def read_safetensors(path):
    """name -> float32 values of a file of bfloat16."""
    with open(path, "rb") as f:
        data = f.read()
    n = struct.unpack("<Q", data[:8])[0]
    tensors = {}
    for name, t in json.loads(data[8:8 + n]).items():
        if name != "__metadata__":
            begin, end = t["data_offsets"]
            raw = np.frombuffer(data[8 + n + begin:8 + n + end], np.uint16)
            tensors[name] = (raw.astype(np.uint32) << 16).view(np.float32).reshape(t["shape"])
    return tensors


# ---- blocks: rounded to nearest ----

def halves(x):
    return x.astype(np.float16)[:, None].view(np.uint8)


def inverse(d):
    return np.divide(1, d, out=np.zeros_like(d), where=d != 0)


def q8_0(x):
    x = x.reshape(-1, 32)
    d = (np.abs(x).max(1) / 127).astype(np.float16).astype(np.float32)
    codes = np.rint(x * inverse(d)[:, None]).clip(-127, 127).astype(np.int8)
    return np.concatenate([halves(d), codes.view(np.uint8)], 1)


def q4_0(x):
    x = x.reshape(-1, 32)
    d = (np.abs(x).max(1) / 8).astype(np.float16).astype(np.float32)
    codes = (np.rint(x * inverse(d)[:, None]) + 8).clip(0, 15).astype(np.uint8)
    return np.concatenate([halves(d), codes[:, :16] | codes[:, 16:] << 4], 1)


def q4_k(x):
    """256 values: eight groups of 32, each with a scale and a minimum of 6 bits."""
    x = x.reshape(-1, 8, 32)
    low, high = np.minimum(x.min(2), 0), x.max(2)
    scale = np.maximum(high - low, 0) / 15
    d, least = ((v.max(1) / 63).astype(np.float16).astype(np.float32) for v in (scale, -low))
    s = np.rint(scale * inverse(d)[:, None]).clip(0, 63).astype(np.uint8)
    m = np.rint(-low * inverse(least)[:, None]).clip(0, 63).astype(np.uint8)
    step, base = d[:, None] * s, least[:, None] * m
    codes = np.rint((x + base[:, :, None]) * inverse(step)[:, :, None]).clip(0, 15)
    pairs = codes.astype(np.uint8).reshape(-1, 4, 2, 32)
    bits = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6,
            s[:, 4:] & 15 | (m[:, 4:] & 15) << 4]
    return np.concatenate([halves(d), halves(least), *bits,
                           (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)], 1)


def encoded(x, form):
    """(type, bytes) of a tensor; a row that is no whole block of form gets blocks of 32."""
    if x.ndim == 1:
        return F32, x.astype(np.float32).tobytes()
    if form == "q4_k" and x.shape[1] % 256 == 0:
        return Q4_K, q4_k(x).tobytes()
    return (Q4_0, q4_0(x).tobytes()) if form == "q4_0" else (Q8_0, q8_0(x).tobytes())


# ---- the file ----

def text(s):
    raw = s.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(v):
    """Type and bytes of a setting."""
    if isinstance(v, bool):
        return struct.pack("<I?", BOOL, v)
    if isinstance(v, int):
        return struct.pack("<II", U32, v)
    if isinstance(v, float):
        return struct.pack("<If", FLOAT, v)
    if isinstance(v, str):
        return struct.pack("<I", STRING) + text(v)
    kind = STRING if isinstance(v[0], str) else I32
    items = [text(x) if kind == STRING else struct.pack("<I", x) for x in v]
    return struct.pack("<IIQ", ARRAY, kind, len(v)) + b"".join(items)


def settings(folder):
    """The file's settings, of the directory's configuration and tokenizer."""
    def load(name):
        with open(os.path.join(folder, name), encoding="utf-8") as f:
            return json.load(f)

    c, tokenizer, own = load("config.json"), load("tokenizer.json"), load("tokenizer_config.json")
    vocab = tokenizer["model"]["vocab"]
    special = {t["id"] for t in tokenizer["added_tokens"] if t["special"]}
    kinds = [TOKEN_CONTROL if i in special else TOKEN_NORMAL for i in range(len(vocab))]
    return {
        "general.architecture": "llama",
        "llama.context_length": c["max_position_embeddings"],
        "llama.embedding_length": c["hidden_size"],
        "llama.block_count": c["num_hidden_layers"],
        "llama.feed_forward_length": c["intermediate_size"],
        "llama.attention.head_count": c["num_attention_heads"],
        "llama.attention.head_count_kv": c["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "llama.rope.dimension_count": c["head_dim"],
        "llama.rope.freq_base": float(c["rope_theta"]),
        "llama.vocab_size": c["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.get),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(m) for m in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": c["bos_token_id"],
        "tokenizer.ggml.eos_token_id": c["eos_token_id"],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": own["chat_template"],
    }


def in_pairs(w, heads):
    """Rows of each head in the order of GGUF's rotation: 0, d / 2, 1, d / 2 + 1 and so on."""
    rows, cols = w.shape
    return w.reshape(heads, 2, rows // heads // 2, cols).swapaxes(1, 2).reshape(rows, cols)


def tensors(folder, config):
    """(name, values) of the file."""
    for name, w in read_safetensors(os.path.join(folder, "model.safetensors")).items():
        ends = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
        if name in ends:
            yield ends[name], w
            continue
        layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = "llama.attention.head_count" + ("" if "q_proj" in part else "_kv")
            w = in_pairs(w, config[heads])
        yield f"blk.{layer}.{NAMES[part]}.weight", w


def write_file(path, config, weights, form):
    about, data = [], b""
    for name, w in weights:
        kind, raw = encoded(w, form)
        dims = struct.pack(f"<I{w.ndim}Q", w.ndim, *reversed(w.shape))
        about.append(text(name) + dims + struct.pack("<IQ", kind, len(data)))
        data += raw + b"\0" * (-len(raw) % ALIGNMENT)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(about), len(config))
    head += b"".join(text(k) + value(v) for k, v in config.items()) + b"".join(about)
    with open(path, "wb") as f:
        f.write(head + b"\0" * (-len(head) % ALIGNMENT) + data)


def write_gguf(folder, form, parts=1):
    """The model of a directory as a file in it, or as several, of which the first has no tensors; returns the first."""
    config = settings(folder)
    weights = list(tensors(folder, config))
    if parts == 1:
        path = os.path.join(folder, "model.gguf")
        write_file(path, config, weights, form)
        return path
    paths = [os.path.join(folder, f"model-{i + 1:05}-of-{parts:05}.gguf") for i in range(parts)]
    for i, path in enumerate(paths):
        place = {"split.no": i, "split.count": parts, "split.tensors.count": len(weights)}
        own = weights[i - 1::parts - 1] if i > 0 else []
        write_file(path, (config if i == 0 else {}) | place, own, form)
    return paths[0]


def write_groups(folder, form):
    """What `quire quantize` makes of a directory, in a folder beside it, which is returned."""
    to = folder.rstrip("/") + "-quantised"
    subprocess.run([QUIRE, "quantize", folder, to, "--format", *form.split()], check=True,
                   stdout=subprocess.DEVNULL)
    return to
