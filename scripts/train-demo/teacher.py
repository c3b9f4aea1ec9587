"""SmolLM2-135M-Instruct in plain PyTorch: batched sampling and scoring, nothing more.

Large lockstep batches keep a GPU busy without CUDA graphs: every row of a batch has a prompt of the same length, so no
padding and no mask exist, and rows that have ended are squeezed out of the key/value cache from time to time.
"""
import json
import math
import os

import torch
import torch.nn.functional as F


def read_gguf(path):
    """A LLaMA-architecture GGUF file as (config, tensors by Hugging Face's names)."""
    import gguf
    import numpy as np
    reader = gguf.GGUFReader(path)
    field = lambda key: reader.fields["llama." + key].contents()
    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    cfg = dict(n_layers=field("block_count"), hidden=field("embedding_length"), heads=heads, kv_heads=kv_heads,
               theta=field("rope.freq_base"), eps=field("attention.layer_norm_rms_epsilon"))
    part = dict(attn_norm="input_layernorm", ffn_norm="post_attention_layernorm", attn_q="self_attn.q_proj",
                attn_k="self_attn.k_proj", attn_v="self_attn.v_proj", attn_output="self_attn.o_proj",
                ffn_gate="mlp.gate_proj", ffn_up="mlp.up_proj", ffn_down="mlp.down_proj")
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    tensors = {}
    for t in reader.tensors:
        w = gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)
        if t.name in whole:
            tensors[whole[t.name]] = torch.from_numpy(w)
        elif t.name.startswith("blk."):
            _, layer, name, _ = t.name.split(".")
            if name in ("attn_q", "attn_k"):  # GGUF keeps rotary pairs side by side, Hugging Face in two halves
                n = heads if name == "attn_q" else kv_heads
                w = w.reshape(n, w.shape[0] // n // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)
            tensors[f"model.layers.{layer}.{part[name]}.weight"] = torch.from_numpy(np.ascontiguousarray(w))
    return cfg, tensors


def read_hf(path):
    from safetensors.torch import load_file
    c = json.load(open(os.path.join(path, "config.json")))
    theta = c.get("rope_theta") or c["rope_parameters"]["rope_theta"]
    cfg = dict(n_layers=c["num_hidden_layers"], hidden=c["hidden_size"], heads=c["num_attention_heads"],
               kv_heads=c["num_key_value_heads"], theta=theta, eps=c["rms_norm_eps"])
    return cfg, load_file(os.path.join(path, "model.safetensors"))


class Teacher:
    def __init__(self, path, device, dtype):
        self.cfg, w = read_gguf(path) if path.endswith(".gguf") else read_hf(path)
        c = self.cfg
        self.hd = c["hidden"] // c["heads"]
        put = lambda t: t.to(device, dtype)
        self.embed = put(w["model.embed_tokens.weight"])
        self.norm = put(w["model.norm.weight"])
        self.layers = []
        for i in range(c["n_layers"]):
            g = lambda name: w[f"model.layers.{i}.{name}.weight"]
            self.layers.append(dict(
                n1=put(g("input_layernorm")), n2=put(g("post_attention_layernorm")),
                qkv=put(torch.cat([g("self_attn.q_proj"), g("self_attn.k_proj"), g("self_attn.v_proj")])),
                o=put(g("self_attn.o_proj")), gu=put(torch.cat([g("mlp.gate_proj"), g("mlp.up_proj")])),
                down=put(g("mlp.down_proj"))))
        self.device, self.dtype = device, dtype
        inv = c["theta"] ** (-torch.arange(0, self.hd, 2, dtype=torch.float32) / self.hd)
        angle = torch.outer(torch.arange(4096, dtype=torch.float32), inv)
        self.cos = torch.cat([angle.cos()] * 2, 1).to(device, dtype)  # [positions, head_dim]
        self.sin = torch.cat([angle.sin()] * 2, 1).to(device, dtype)

    def forward(self, ids, pos, cache, last_only=True):
        """ids [B, T] at positions pos.. ; cache: per layer (k, v) of [B, kv_heads, capacity, head_dim] or None."""
        c, hd = self.cfg, self.hd
        B, T = ids.shape
        H, K = c["heads"], c["kv_heads"]
        cos, sin = self.cos[pos:pos + T], self.sin[pos:pos + T]
        x = self.embed[ids]
        for i, l in enumerate(self.layers):
            h = F.rms_norm(x, (c["hidden"],), l["n1"], c["eps"])
            qkv = F.linear(h, l["qkv"]).view(B, T, H + 2 * K, hd).transpose(1, 2)
            qk = qkv[:, :H + K]
            a, b = qk.chunk(2, -1)
            qk = qk * cos + torch.cat([-b, a], -1) * sin
            q, k, v = qk[:, :H], qk[:, H:], qkv[:, H + K:]
            if cache is not None:
                kc, vc = cache[i]
                kc[:, :, pos:pos + T] = k
                vc[:, :, pos:pos + T] = v
                k, v = kc[:, :, :pos + T], vc[:, :, :pos + T]
            if T == 1:  # the query heads of one KV head as rows of one small product: each key is read once
                y = F.scaled_dot_product_attention(q.reshape(B, K, H // K, hd), k, v).reshape(B, 1, H * hd)
            else:
                k, v = (t.repeat_interleave(H // K, 1) for t in (k, v))
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                y = y.transpose(1, 2).reshape(B, T, H * hd)
            x = x + F.linear(y, l["o"])
            g, u = F.linear(F.rms_norm(x, (c["hidden"],), l["n2"], c["eps"]), l["gu"]).chunk(2, -1)
            x = x + F.linear(F.silu(g) * u, l["down"])
        if last_only:
            x = x[:, -1:]
        return F.linear(F.rms_norm(x, (c["hidden"],), self.norm, c["eps"]), self.embed)

    @torch.inference_mode()
    def sample(self, prompts, max_new, eos, temperature, min_p, penalty, banned=None, squeeze_every=24):
        """prompts: int64 [B, P]. A token's logit falls by `penalty` for each time it was made before (four at most).
        Yields lists of (row, ids, ended) as rows leave the batch."""
        B, P = prompts.shape
        shape = (B, self.cfg["kv_heads"], P + max_new, self.hd)
        cache = [tuple(torch.empty(shape, device=self.device, dtype=self.dtype) for _ in range(2))
                 for _ in self.layers]
        row = torch.arange(B, device=self.device)
        made = torch.full((B, max_new), eos, device=self.device, dtype=torch.int32)
        done = torch.zeros(B, dtype=torch.bool, device=self.device)
        logits = self.forward(prompts.to(self.device), 0, cache)[:, 0]
        seen = torch.zeros_like(logits)  # [B, vocabulary], how often each token was made
        for t in range(max_new):
            x = (logits - penalty * seen.clamp(max=4)).float() / temperature
            if banned is not None:
                x.index_fill_(1, banned, -math.inf)
            floor = x.amax(1, keepdim=True) + math.log(min_p)
            noise = torch.empty_like(x).exponential_().log_()
            token = torch.where(x < floor, -math.inf, x - noise).argmax(1)
            token = torch.where(done, eos, token)
            done = done | (token == eos)
            made[:, t] = token
            seen.scatter_add_(1, token[:, None], torch.ones_like(seen[:, :1]))
            last = t + 1 == max_new
            if (t + 1) % squeeze_every == 0 or last:
                out = torch.ones_like(done) if last else done
                leave = out.nonzero()[:, 0]
                if last or len(leave) > 0.15 * len(row):
                    yield list(zip(row[leave].tolist(), made[leave, :t + 1].tolist(), done[leave].tolist()))
                    keep = (~out).nonzero()[:, 0]
                    if len(keep) == 0:
                        return
                    # Only the positions written so far are worth copying.
                    for i, (k, v) in enumerate(cache):
                        cache[i] = tuple(self.shrink(c, keep, P + t + 1) for c in (k, v))
                    row, made, done, token, seen = row[keep], made[keep], done[keep], token[keep], seen[keep]
            if not last:
                logits = self.forward(token[:, None], P + t, cache)[:, 0]

    @staticmethod
    def shrink(c, keep, used):
        new = torch.empty((len(keep),) + tuple(c.shape[1:]), device=c.device, dtype=c.dtype)
        new[:, :, :used] = c[keep, :, :used] if len(keep) < 64 else torch.index_select(c[:, :, :used], 0, keep)
        return new

    @torch.inference_mode()
    def score(self, ids):
        """Sum of -log p(ids[i] | ids[<i]) in nats for i >= 1; ids: a list."""
        x = torch.tensor([ids], device=self.device)
        logits = self.forward(x[:, :-1], 0, None, last_only=False)[0].float()
        return F.cross_entropy(logits, x[0, 1:], reduction="sum").item()
