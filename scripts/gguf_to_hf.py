"""Turn a llama-architecture GGUF file into a Hugging Face directory: bf16 safetensors, config, tokenizer.

Two things differ between the formats and are put back here: llama.cpp stores the rows of q and k in the order of
interleaved rotation pairs, and GGUF names the pre-tokenizer ("smollm") where tokenizer.json spells it out. For
"smollm" that is: each digit on its own, then GPT-2's ByteLevel pattern.
"""
import os
import sys

import gguf

from hf_files import to_bf16, write_json, write_safetensors

NAMES = {  # GGUF -> Hugging Face; %d is the layer
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.%d.attn_norm.weight": "model.layers.%d.input_layernorm.weight",
    "blk.%d.attn_q.weight": "model.layers.%d.self_attn.q_proj.weight",
    "blk.%d.attn_k.weight": "model.layers.%d.self_attn.k_proj.weight",
    "blk.%d.attn_v.weight": "model.layers.%d.self_attn.v_proj.weight",
    "blk.%d.attn_output.weight": "model.layers.%d.self_attn.o_proj.weight",
    "blk.%d.ffn_norm.weight": "model.layers.%d.post_attention_layernorm.weight",
    "blk.%d.ffn_gate.weight": "model.layers.%d.mlp.gate_proj.weight",
    "blk.%d.ffn_up.weight": "model.layers.%d.mlp.up_proj.weight",
    "blk.%d.ffn_down.weight": "model.layers.%d.mlp.down_proj.weight",
}
PRE_TOKENIZERS = {
    "smollm": [{"type": "Digits", "individual_digits": True},
               {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}],
}
CONTROL = 3  # tokenizer.ggml.token_type of special tokens


def halves_from_pairs(w, n_heads):
    """Rows of each head from (0, d/2, 1, d/2 + 1, ...) back to (0, 1, 2, ...)."""
    rows, cols = w.shape
    return w.reshape(n_heads, rows // n_heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


def read_weights(reader, n_heads, n_kv_heads):
    out = {}
    for t in reader.tensors:
        parts = t.name.split(".")
        layer = int(parts[1]) if parts[0] == "blk" else -1
        key = t.name if layer < 0 else t.name.replace("blk.%d." % layer, "blk.%d.")
        if key not in NAMES:
            sys.exit("gguf_to_hf: tensor %s is not one of a llama's" % t.name)
        w = gguf.dequantize(t.data, t.tensor_type).reshape([int(d) for d in reversed(t.shape)])
        if "attn_q." in key or "attn_k." in key:
            w = halves_from_pairs(w, n_heads if "attn_q." in key else n_kv_heads)
        out[NAMES[key] % layer if layer >= 0 else NAMES[key]] = to_bf16(w)
    return out


def tokenizer_json(tokens, merges, special, pre):
    added = [{"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for i in special]
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre}, "post_processor": None, "decoder": byte_level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": {t: i for i, t in enumerate(tokens)}, "merges": [m.split(" ") for m in merges]}}


def main(source, target):
    reader = gguf.GGUFReader(source)

    def field(name):
        return reader.fields[name].contents() if name in reader.fields else None

    if field("general.architecture") != "llama" or field("tokenizer.ggml.pre") not in PRE_TOKENIZERS:
        sys.exit("gguf_to_hf: %s: only the llama architecture with pre-tokenizer %s is known" %
                 (source, ", ".join(PRE_TOKENIZERS)))
    n_heads, n_kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    tokens = field("tokenizer.ggml.tokens")
    bos, eos = field("tokenizer.ggml.bos_token_id"), field("tokenizer.ggml.eos_token_id")
    special = [i for i, kind in enumerate(field("tokenizer.ggml.token_type")) if kind == CONTROL]
    weights = read_weights(reader, n_heads, n_kv_heads)

    os.makedirs(target, exist_ok=True)
    write_safetensors(os.path.join(target, "model.safetensors"), {name: w.shape for name, w in weights.items()}, weights.get)
    write_json(os.path.join(target, "tokenizer.json"),
               tokenizer_json(tokens, field("tokenizer.ggml.merges"), special, PRE_TOKENIZERS[field("tokenizer.ggml.pre")]))
    write_json(os.path.join(target, "tokenizer_config.json"), {
        "tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False, "clean_up_tokenization_spaces": False,
        "bos_token": tokens[bos], "eos_token": tokens[eos], "unk_token": tokens[field("tokenizer.ggml.unknown_token_id")],
        "pad_token": tokens[field("tokenizer.ggml.padding_token_id")], "model_max_length": field("llama.context_length"),
        "chat_template": field("tokenizer.chat_template")})
    write_json(os.path.join(target, "generation_config.json"), {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos})
    write_json(os.path.join(target, "config.json"), {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos,
        "hidden_size": field("llama.embedding_length"), "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"), "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads, "max_position_embeddings": field("llama.context_length"), "mlp_bias": False,
        "rms_norm_eps": round(float(field("llama.attention.layer_norm_rms_epsilon")), 12), "rope_scaling": None,
        "rope_theta": float(field("llama.rope.freq_base")), "tie_word_embeddings": "lm_head.weight" not in weights,
        "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": len(tokens)})


if __name__ == "__main__":
    main(*sys.argv[1:])
