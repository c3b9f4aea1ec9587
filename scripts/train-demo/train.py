#!/usr/bin/env python3
"""Train the demo model on sampled text, our own stories and facts; write a Hugging Face directory.

    train.py --samples FILE.jsonl --out DIR [--seconds 170] [--teacher DIR|GGUF --teacher-tokenizer JSON]

The step is compiled on random ids first and then waits up to --wait seconds for FILE.done, so that sampling and compiling
can share the time. The learning rate follows a cosine in time, not in steps: the run ends when --seconds are used up.
"""
import argparse
import itertools
import json
import math
import multiprocessing
import os
import random
import time

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from prompts import facts
from stories import stories

BOS, EOS = "<s>", "</s>"


def own_text(job):
    source, seed, n = job
    g = stories(seed) if source == "stories" else facts(seed)
    return list(itertools.islice(g, n))


def corpus(path, n_stories, n_facts, seed):
    """(training texts, held-out texts by kind); a text is (string, ended). Kinds are mixed at random."""
    with open(path) as f:
        sampled = {d["text"]: d["ended"] for d in map(json.loads, f)}
    n_jobs = 16
    with multiprocessing.get_context("fork").Pool(min(16, os.cpu_count())) as pool:
        jobs = [("stories", seed * 1000 + i, n_stories // n_jobs) for i in range(n_jobs)]
        jobs += [("facts", seed * 1000 + i, n_facts // n_jobs) for i in range(n_jobs)]
        own = pool.map(own_text, jobs)
    s = [(t, True) for part in own[:n_jobs] for t in part]
    f = [(t, True) for part in own[n_jobs:] for t in part]
    r = random.Random(seed)
    m = list(sampled.items())
    r.shuffle(m)
    held = min(1000, len(m) // 20)
    train = m[held:] + s[held:] + f
    seen = {t for t, _ in train}
    valid = {"sampled": [t for t, e in m[:held] if e], "stories": [t for t, _ in s[:held] if t not in seen]}
    r.shuffle(train)
    return train, valid


def make_tokenizer(texts, vocab):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                 pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab, special_tokens=[BOS, EOS], show_progress=False,
                                                       initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tok.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)])
    return tok


def pack(tok, texts):
    """One stream of ids; a text that was cut off has no end mark."""
    out = []
    for i in range(0, len(texts), 65536):
        part = texts[i:i + 65536]
        for enc, (_, ended) in zip(tok.encode_batch_fast([t for t, _ in part]), part):
            out.extend(enc.ids)
            if ended:
                out.append(1)
    return torch.tensor(out, dtype=torch.int16)


class Model(torch.nn.Module):
    """LLaMA: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied embeddings."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        d, hd, m = c["hidden_size"], c["head_dim"], c["intermediate_size"]
        q, kv = c["num_attention_heads"] * hd, c["num_key_value_heads"] * hd
        lin = lambda i, o: torch.nn.Linear(i, o, bias=False)
        self.embed = torch.nn.Embedding(c["vocab_size"], d)
        self.layers = torch.nn.ModuleList(torch.nn.ModuleDict(dict(
            n1=torch.nn.RMSNorm(d, c["rms_norm_eps"]), n2=torch.nn.RMSNorm(d, c["rms_norm_eps"]),
            q=lin(d, q), k=lin(d, kv), v=lin(d, kv), o=lin(q, d), gate=lin(d, m), up=lin(d, m), down=lin(m, d)))
            for _ in range(c["num_hidden_layers"]))
        self.norm = torch.nn.RMSNorm(d, c["rms_norm_eps"])
        inv = c["rope_theta"] ** (-torch.arange(0, hd, 2, dtype=torch.float32) / hd)
        angle = torch.outer(torch.arange(c["max_position_embeddings"], dtype=torch.float32), inv)
        self.register_buffer("cos", torch.cat([angle.cos()] * 2, 1), persistent=False)
        self.register_buffer("sin", torch.cat([angle.sin()] * 2, 1), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                std = 0.02 / math.sqrt(2 * c["num_hidden_layers"]) if name.endswith(("o.weight", "down.weight")) else 0.02
                torch.nn.init.normal_(p, std=std)

    def forward(self, ids, target=None):
        B, T = ids.shape
        hd, H, K = self.c["head_dim"], self.c["num_attention_heads"], self.c["num_key_value_heads"]
        x = self.embed(ids)
        cos, sin = self.cos[:T].to(x.dtype), self.sin[:T].to(x.dtype)

        def rotate(t):
            a, b = t.chunk(2, -1)
            return t * cos + torch.cat([-b, a], -1) * sin
        for l in self.layers:
            h = l["n1"](x)
            q, k, v = (l[n](h).view(B, T, -1, hd).transpose(1, 2) for n in "qkv")
            y = F.scaled_dot_product_attention(rotate(q).to(v.dtype), rotate(k).to(v.dtype).repeat_interleave(H // K, 1),
                                               v.repeat_interleave(H // K, 1), is_causal=True)
            x = x + l["o"](y.transpose(1, 2).reshape(B, T, H * hd))
            h = l["n2"](x)
            x = x + l["down"](F.silu(l["gate"](h)) * l["up"](h))
        logits = F.linear(self.norm(x), self.embed.weight)
        return logits if target is None else F.cross_entropy(logits.view(B * T, -1).float(), target.reshape(-1))

    def hf_tensors(self):
        w = {"model.embed_tokens.weight": self.embed.weight, "model.norm.weight": self.norm.weight}
        names = dict(q="self_attn.q_proj", k="self_attn.k_proj", v="self_attn.v_proj", o="self_attn.o_proj", gate="mlp.gate_proj",
                     up="mlp.up_proj", down="mlp.down_proj", n1="input_layernorm", n2="post_attention_layernorm")
        for i, l in enumerate(self.layers):
            for short, name in names.items():
                w[f"model.layers.{i}.{name}.weight"] = l[short].weight
        return {k: v.detach().to(torch.bfloat16).cpu().contiguous() for k, v in w.items()}


CONFIG = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=4096, hidden_size=256, intermediate_size=704,
              num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, head_dim=64, hidden_act="silu",
              max_position_embeddings=1024, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None, attention_bias=False,
              mlp_bias=False, attention_dropout=0.0, initializer_range=0.02, tie_word_embeddings=True, use_cache=True,
              bos_token_id=0, eos_token_id=1, torch_dtype="bfloat16")


def save(model, tok, out):
    from safetensors.torch import save_file
    os.makedirs(out, exist_ok=True)
    dump = lambda name, x: open(os.path.join(out, name), "w").write(json.dumps(x, indent=2) + "\n")
    save_file(model.hf_tensors(), os.path.join(out, "model.safetensors"), metadata={"format": "pt"})
    tok.save(os.path.join(out, "tokenizer.json"), pretty=False)
    dump("config.json", CONFIG)
    dump("generation_config.json", dict(bos_token_id=0, eos_token_id=1, do_sample=True, temperature=0.4, top_p=0.95))
    dump("tokenizer_config.json", dict(tokenizer_class="PreTrainedTokenizerFast", bos_token=BOS, eos_token=EOS, model_max_length=1024,
                                       add_bos_token=True, add_eos_token=False, clean_up_tokenization_spaces=False))


@torch.no_grad()
def nats(model, tok, texts, device):
    """Sum of -ln p over whole texts (each after BOS, its end not counted), and their bytes."""
    total = 0.0
    for t in texts:
        ids = torch.tensor([tok.encode(t).ids[:1024]], device=device)
        total += F.cross_entropy(model(ids[:, :-1])[0].float(), ids[0, 1:], reduction="sum").item()
    return total, sum(len(t.encode()) for t in texts)


@torch.no_grad()
def generate(model, tok, prompt, device, n=80, temperature=0.7, top_p=0.95):
    ids = tok.encode(prompt).ids
    for _ in range(n):
        p = torch.softmax(model(torch.tensor([ids[-1024:]], device=device))[0, -1].float() / temperature, 0)
        top, index = p.sort(descending=True)
        top = top * (top.cumsum(0) - top < top_p)
        i = index[torch.multinomial(top, 1)].item()
        if i == 1:
            break
        ids.append(i)
    return tok.decode(ids)


STARTS = ["Once upon a time", "Once upon a time, there was a little fox", "The capital of France is", "The sun", "Lily had a red ball. One day,", "My best friend", "A baby dog is called",
          "\"Good morning,\" said", "It was raining, and", "The old farmer", "Cats are", "In the morning, I", "The opposite of hot is", "Tom and Anna went to the", "What color is the sky?",
          "The baker", "One cold winter night,", "Two plus two is", "The little boat", "People like books because"]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--samples", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--seconds", type=float, default=170)
    p.add_argument("--wait", type=float, default=0)
    p.add_argument("--rows", type=int, default=128)
    p.add_argument("--context", type=int, default=1024)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--stories", type=int, default=200000)
    p.add_argument("--facts", type=int, default=120000)
    p.add_argument("--teacher")
    p.add_argument("--teacher-tokenizer")
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(a.seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = Model(CONFIG).to(device)
    n_params = sum(x.numel() for x in model.parameters())
    decay = [x for x in model.parameters() if x.dim() == 2]
    rest = [x for x in model.parameters() if x.dim() < 2]
    opt = torch.optim.AdamW([dict(params=decay, weight_decay=0.1), dict(params=rest, weight_decay=0.0)], lr=a.lr, betas=(0.9, 0.95),
                            fused=device == "cuda")
    step_fn = model if a.no_compile else torch.compile(model)

    def loss_of(x, y):
        with torch.autocast(device, dtype=torch.bfloat16):
            return step_fn(x, y)
    t0 = time.time()
    try:
        x = torch.randint(0, 4096, (a.rows, a.context + 1), device=device)
        loss_of(x[:, :-1].contiguous(), x[:, 1:].contiguous()).backward()
    except Exception as ex:
        print(f"compiling failed ({type(ex).__name__}: {str(ex)[:300]}); going on without", flush=True)
        step_fn = model
    opt.zero_grad(set_to_none=True)
    print(f"{n_params / 1e6:.2f} M parameters; first step after {time.time() - t0:.0f} s", flush=True)
    while time.time() - t0 < a.wait and not os.path.exists(a.samples + ".done"):
        time.sleep(0.5)
    t0 = time.time()
    train, valid = corpus(a.samples, a.stories, a.facts, a.seed)
    tok = make_tokenizer([t for t, _ in train[:60000]], CONFIG["vocab_size"])
    data = pack(tok, train)
    print(f"{len(train)} texts, {sum(len(t) for t, _ in train) / 1e6:.0f} MB, {len(data) / 1e6:.1f} M tokens after {time.time() - t0:.0f} s", flush=True)
    data = data.to(device)
    n_rows = (len(data) - 1) // a.context
    start, step, order, at = time.time(), 0, torch.randperm(n_rows), 0
    column = torch.arange(a.context + 1, device=device)
    while (progress := (time.time() - start) / a.seconds) < 1:
        if at + a.rows > n_rows:
            order, at = torch.randperm(n_rows), 0
        row = order[at:at + a.rows].to(device)
        at += a.rows
        x = data[row[:, None] * a.context + column].long()
        lr = a.lr * min(1, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for g in opt.param_groups:
            g["lr"] = lr
        loss = loss_of(x[:, :-1].contiguous(), x[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        step += 1
        if step % 20 == 0:
            torch.cuda.synchronize() if device == "cuda" else None  # keeps the clock of the schedule honest
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}, epoch {step * a.rows / n_rows:.2f}, {step * x[:, 1:].numel() / (time.time() - start) / 1e6:.2f} M tokens/s, "
                  f"{time.time() - start:.0f} s", flush=True)
    report = dict(parameters=n_params, steps=step, tokens=step * a.rows * a.context, corpus_tokens=len(data), seconds=round(time.time() - start),
                  device=torch.cuda.get_device_name() if device == "cuda" else "cpu")
    save(model, tok, a.out)
    model.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})  # measure what was saved
    for kind, texts in valid.items():
        total, size = nats(model, tok, texts[:500], device)
        report[f"nats_per_byte_{kind}"] = total / max(1, size)
    if a.teacher:
        from teacher import Teacher
        t, tt = Teacher(a.teacher, device, torch.float32), Tokenizer.from_file(a.teacher_tokenizer)
        for kind, texts in valid.items():
            # "<|endoftext|>" (id 0) stands in front, as BOS does for the demo model.
            total = sum(t.score([0] + tt.encode(x).ids) for x in texts[:500])
            report[f"nats_per_byte_{kind}_teacher"] = total / max(1, sum(len(x.encode()) for x in texts[:500]))
    torch.manual_seed(0)
    report["samples"] = [generate(model, tok, s, device) for s in STARTS]
    with open(os.path.join(a.out, "report.json"), "w") as f:
        json.dump(report, f, indent=2)
    with open(os.path.join(a.out, "heldout.json"), "w") as f:
        json.dump({k: v[:500] for k, v in valid.items()}, f)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
