"""A LLaMA model of a directory in float64: its weights as they are stored or decoded, and the inputs of products rounded by
the scales that the file has for them, as the formats say and nothing else."""
import json
import os
import struct

import numpy as np

TYPES = {"BF16": np.uint16, "F32": np.float32, "I8": np.int8, "F8_E4M3": np.uint8}


def e4m3_values():
    code = np.arange(256)
    e, m = code >> 3 & 15, code & 7
    size = np.where(e == 0, m * 2.0**-9, (8 + m) * 2.0**(e - 10.0))
    return np.where(code >> 7, -size, size)


def e4m3_nearest(x):
    """The nearest value, ties to an even code, of at most 448."""
    size = np.minimum(np.abs(x), 448)
    step = np.exp2(np.floor(np.log2(np.maximum(size, 2.0**-6))) - 3)
    return np.sign(x) * np.minimum(np.rint(size / step) * step, 448)


def values(kind, raw):
    if kind == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return e4m3_values()[raw] if kind == "F8_E4M3" else raw.astype(np.float64)


def tensors(path):
    """name -> (type, float64 values of what is stored)."""
    with open(path, "rb") as f:
        data = f.read()
    n = struct.unpack("<Q", data[:8])[0]
    out = {}
    for name, t in json.loads(data[8:8 + n]).items():
        if name != "__metadata__":
            begin, end = (8 + n + at for at in t["data_offsets"])
            raw = np.frombuffer(data[begin:end], TYPES[t["dtype"]]).reshape(t["shape"])
            out[name] = (t["dtype"], values(t["dtype"], raw))
    return out


class Float64Model:
    def __init__(self, directory):
        with open(os.path.join(directory, "config.json")) as f:
            self.config = json.load(f)
        stored = tensors(os.path.join(directory, "model.safetensors"))
        self.weight, self.input = {}, {}
        for name, (kind, x) in stored.items():
            module, _, part = name.rpartition(".")
            if part == "input_scale":
                self.input[module] = (stored[module + ".weight"][0], x.item())
            elif part == "weight":
                zero = stored.get(module + ".weight_zero_point", (kind, 0))[1]
                self.weight[module] = (x - zero) * stored.get(module + ".weight_scale", (kind, 1))[1]

    def rounded(self, module, x):
        """The input of a product as the file's scale has it."""
        kind, scale = self.input[module]
        codes = e4m3_nearest(x / scale) if kind == "F8_E4M3" else np.rint(x / scale).clip(-127, 127)
        return codes * scale

    def linear(self, module, x, rounds):
        return (self.rounded(module, x) if rounds else x) @ self.weight[module].T

    def norm(self, module, x):
        return x / np.sqrt((x * x).mean(1, keepdims=True) + self.config["rms_norm_eps"]) * self.weight[module]

    def rotated(self, x):
        """[tokens, heads, head_dim]"""
        half = x.shape[2] // 2
        angle = np.arange(len(x))[:, None] / self.config["rope_theta"]**(np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[:, :, :half], x[:, :, half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], 2)

    def attention(self, at, h, rounds):
        c, n = self.config, len(h)
        q, k, v = (self.linear(at + p + "_proj", h, rounds).reshape(n, -1, c["head_dim"]) for p in "qkv")
        q, k = self.rotated(q), self.rotated(k)
        each = q.shape[1] // k.shape[1]
        score = np.einsum("ihd,jhd->hij", q, k.repeat(each, 1)) / np.sqrt(c["head_dim"])
        score = np.where(np.tri(n, dtype=bool), score, -np.inf)
        p = np.exp(score - score.max(2, keepdims=True))
        p /= p.sum(2, keepdims=True)
        out = np.einsum("hij,jhd->ihd", p, v.repeat(each, 1)).reshape(n, -1)
        return self.linear(at + "o_proj", out, rounds)

    def log_probabilities(self, ids, rounds):
        """Of each token but the first. `rounds`: with inputs rounded by the file's scales."""
        x = self.weight["model.embed_tokens"][ids]
        for i in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{i}."
            x = x + self.attention(at + "self_attn.", self.norm(at + "input_layernorm", x), rounds)
            h = self.norm(at + "post_attention_layernorm", x)
            gate, up = (self.linear(f"{at}mlp.{p}_proj", h, rounds) for p in ("gate", "up"))
            x = x + self.linear(at + "mlp.down_proj", gate / (1 + np.exp(-gate)) * up, rounds)
        logits = self.norm("model.norm", x) @ self.weight["model.embed_tokens"].T
        top = logits.max(1, keepdims=True)
        lp = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
        return lp[np.arange(len(ids) - 1), ids[1:]]
