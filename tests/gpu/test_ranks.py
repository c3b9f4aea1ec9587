"""One model on several GPUs, compared with one GPU: texts, preemption, beams, and the loss of a rank.

QUIRE_GPU_RANKS sets their number (2). Tensor parallelism splits each layer over them; some tests use pipeline
parallelism instead, or both (with four GPUs). With QUIRE_GPU_DEVICE=cpu the same tests run on ranks without GPUs."""
import concurrent.futures
import ctypes
import json
import os
import random
import shutil
import signal
import socket
import time

import pytest

import hybrid_model
from alike import assert_alike
from conftest import DEVICE, ROOT, Server
from test_engine import MIX, POOL, PROMPTS, ask, outcome

RANKS = ("--tensor-parallel-size", os.environ.get("QUIRE_GPU_RANKS", "2"))
STAGES = ("--pipeline-parallel-size", "2")


def gpus():
    """GPUs visible to this process."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    n = ctypes.c_int()
    return n.value if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(n)) == 0 else 0


ENOUGH = os.environ.get("QUIRE_GPU_DEVICE") == "cpu" or gpus() >= int(RANKS[1])
pytestmark = pytest.mark.skipif(not ENOUGH, reason=f"fewer than {RANKS[1]} GPUs")


BOTH = pytest.mark.skipif(os.environ.get("QUIRE_GPU_DEVICE") != "cpu" and gpus() < 2 * int(RANKS[1]), reason="too few GPUs for both")
LAYOUTS = [pytest.param(RANKS, id="ranks"), pytest.param(STAGES, id="stages"), pytest.param(RANKS + STAGES, id="both", marks=BOTH)]


def n_of(layout):
    return int(layout[1]) * (int(layout[3]) if len(layout) > 2 else 1)


def ask_all(server, jobs):
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(lambda job: ask(server, job[0], **job[1]), jobs))


def ranks_of(server):
    pids = []
    for d in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{d}/stat") as f:
                state, parent = f.read().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue
        if int(parent) == server.process.pid and state != "Z":
            pids.append(int(d))
    return sorted(pids)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_as_on_one(serve, layout):
    many, one = serve(*POOL, *layout), serve(*POOL)
    assert len(ranks_of(many)) == n_of(layout) - 1
    same = [assert_alike(ask(many, p), ask(one, p)) for p in PROMPTS]
    assert sum(same) > 0.7 * 48 * len(PROMPTS), same
    long = " ".join(PROMPTS * 4)
    assert_alike(ask(many, long, max_tokens=24), ask(one, long, max_tokens=24))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_draws_as_on_one(serve, layout):
    fields = dict(n=8, temperature=0.8, top_p=1, seed=5, max_tokens=24, return_token_ids=True)
    a, b = (ask(s, PROMPTS[1], **fields) for s in (serve(*POOL, *layout), serve(*POOL)))
    same = assert_alike(a, b, temperature=0.8, seed=5)
    assert same > 0.5 * 8 * 24, same


def wide_norm_tensors():
    """OLMo-2: queries and keys are normed over all heads."""
    hidden, rows, mlp = hybrid_model.HIDDEN, hybrid_model.HEADS * hybrid_model.HEAD_DIM, hybrid_model.MLP
    keys = hybrid_model.KV_HEADS * hybrid_model.HEAD_DIM
    yield from hybrid_model.ends("model.norm.weight")
    for i in range(2):
        at = f"model.layers.{i}."
        yield from ((at + f"post_{name}_layernorm.weight", [hidden]) for name in ("attention", "feedforward"))
        yield from ((at + "self_attn." + name, shape) for name, shape in (
            ("q_proj.weight", [rows, hidden]), ("k_proj.weight", [keys, hidden]), ("v_proj.weight", [keys, hidden]),
            ("o_proj.weight", [hidden, rows]), ("q_norm.weight", [rows]), ("k_norm.weight", [keys])))
        yield from ((at + f"mlp.{name}_proj.weight", [mlp, hidden]) for name in ("gate", "up"))
        yield at + "mlp.down_proj.weight", [hidden, mlp]


def test_norms_over_the_heads_of_all_ranks(tmp_path):
    old = hybrid_model.demo_config()
    config = {key: old[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")} | {
        "architectures": ["Olmo2ForCausalLM"], "hidden_size": hybrid_model.HIDDEN, "num_hidden_layers": 2,
        "num_attention_heads": hybrid_model.HEADS, "num_key_value_heads": hybrid_model.KV_HEADS,
        "head_dim": hybrid_model.HEAD_DIM, "intermediate_size": hybrid_model.MLP, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": False, "dtype": "float32"}
    demo = os.path.join(ROOT, "models", "demo")
    for name in filter(lambda n: n.startswith("tokenizer"), os.listdir(demo)):
        shutil.copy(os.path.join(demo, name), tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    hybrid_model.write_safetensors(tmp_path / "model.safetensors", wide_norm_tensors(), random.Random(7))
    many, one = (Server("--device", DEVICE, *POOL, *layout, model=str(tmp_path)) for layout in (RANKS, ()))
    same = [assert_alike(ask(many, p), ask(one, p)) for p in PROMPTS]
    assert many.stop() == 0 and one.stop() == 0
    assert sum(same) > 0.7 * 48 * len(PROMPTS), same


def test_stages_without_nccl_hand_on_by_way_of_the_host(serve, tmp_path):
    (tmp_path / "libnccl.so.2").touch()  # found first, but not a library
    paths = [str(tmp_path), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    many, one = serve(*POOL, *STAGES, env={"LD_LIBRARY_PATH": ":".join(paths)}), serve(*POOL)
    assert "between stages" not in many.log
    long = " ".join(PROMPTS * 4)
    same = [assert_alike(ask(many, p), ask(one, p)) for p in PROMPTS]
    assert sum(same) > 0.7 * 48 * len(PROMPTS), same
    assert_alike(ask(many, long, max_tokens=24), ask(one, long, max_tokens=24))


def test_tokens_are_the_same_where_logits_stay_with_their_ranks(serve):
    many = serve(*POOL, *RANKS)
    for p in PROMPTS:
        with_logits, without = ask(many, p), ask(many, p, logprobs=None)
        assert with_logits["choices"][0]["text"] == without["choices"][0]["text"]


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_prompt_logprobs_as_on_one(serve, layout):
    a, b = (ask(s, PROMPTS[1] + " a dog", echo=True, max_tokens=1) for s in (serve(*POOL, *layout), serve(*POOL)))
    x, y = (r["choices"][0]["logprobs"]["token_logprobs"] for r in (a, b))
    assert len(x) == len(y) and max(abs(p - q) for p, q in zip(x[1:], y[1:])) < 0.15


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_beams_as_on_one(serve, layout):
    fields = dict(n=4, use_beam_search=True, max_tokens=16, logprobs=None)
    a, b = (ask(s, PROMPTS[1], **fields) for s in (serve(*POOL, *layout), serve(*POOL)))
    x, y = ([c["text"] for c in r["choices"]] for r in (a, b))
    assert len(set(x)) == 4 and len(set(x) & set(y)) >= 3, (x, y)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_at_once_are_as_alone(serve, layout):
    server = serve(*POOL, *layout)
    greedy = [(p, {k: v for k, v in fields.items() if k != "repetition_penalty"})  # a factor would hide how near a tie was
              for p, fields in MIX if "temperature" not in fields and "n" not in fields]
    alone = [ask(server, p, **fields) for p, fields in greedy]
    for together in (ask_all(server, greedy), ask_all(server, greedy)):
        for a, b, job in zip(alone, together, greedy):
            assert_alike(a, b, job[1].get("presence_penalty", 0.0))
    ask_all(server, MIX * 2)
    server.wait_idle()


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_as_alone(serve, mode, layout):
    server = serve("--kv-blocks", "40", "--max-num-seqs", "64", "--preemption", mode, *layout)
    greedy = [(p, {"max_tokens": 60}) for p in PROMPTS]
    alone = [ask(server, p, **fields) for p, fields in greedy]
    for a, b in zip(alone + alone, ask_all(server, greedy * 2)):
        assert_alike(a, b)
    assert server.metric("num_preemptions_total", mode=mode) > 0


def test_deterministic_again_and_again(serve):
    server = serve("--deterministic", "true", *POOL, *RANKS)
    first = [outcome(ask(server, p, **fields)) for p, fields in MIX]
    assert [outcome(a) for a in ask_all(server, MIX)] == first


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("after_events", [0, 20])
def test_a_killed_rank_ends_the_service(serve, after_events, layout):
    """Killed while idle, and in mid-stream: the client gets an error and the process ends soon."""
    from conftest import DEVICE, ROOT, Server
    server = Server("--device", DEVICE, *POOL, *layout, model=os.path.join(ROOT, "models", "demo"))
    ask(server, PROMPTS[0], max_tokens=3)
    rank = ranks_of(server)[0]
    text = b""
    if after_events:
        body = json.dumps({"prompt": PROMPTS[0], "stream": True, "n": 4, "max_tokens": 400, "temperature": 1,
                           "ignore_eos": True}).encode()
        sock = socket.create_connection((server.host, server.port), timeout=60)
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                     b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        while text.count(b"data: ") < after_events:
            text += sock.recv(4096)
    begun = time.monotonic()
    os.kill(rank, signal.SIGKILL)
    while after_events and (more := sock.recv(65536)):
        text += more
    error_s = time.monotonic() - begun
    assert server.process.wait(60) == 1, server.log
    print(f"a killed rank: client informed after {error_s:.3f} s, process gone after {time.monotonic() - begun:.3f} s")
    assert f"rank 1 (process {rank})" in server.log, server.log
    # A stream that ended before the rank was gone gets no error.
    assert not after_events or b'"error"' in text or b"[DONE]" in text, text[-500:]
