"""Models with experts: whole experts or slices of them by rank, and how they are loaded."""
import concurrent.futures
import json
import os
import random
import shutil

import pytest

import hybrid_model
from company import DEVICE, ON
from conftest import ROOT, serving

LAYERS, EXPERTS, WIDTH = 3, 4, 16
COMMON = (*ON, "--threads", "1", "--block-size", "4", "--max-num-seqs", "8", "--kv-blocks", "600")
RANKS = ("--tensor-parallel-size", "2", "--expert-parallel")
SLICES = ("--tensor-parallel-size", "2")
STORY = "Once upon a time there was a little dog who lived by the sea. "
BODIES = [
    dict(prompt=STORY * 2, max_tokens=24, temperature=0, ignore_eos=True),
    dict(prompt=STORY, max_tokens=30, temperature=0.8, seed=3, n=3, ignore_eos=True),
    dict(prompt="The cat", max_tokens=40, temperature=1, seed=5, ignore_eos=True),
]


def tensors():
    yield from hybrid_model.ends("model.norm.weight")
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        yield from ((at + f"{norm}_layernorm.weight", [hybrid_model.HIDDEN]) for norm in ("input", "post_attention"))
        yield from hybrid_model.attention(at + "self_attn.", 1)
        yield from ((at + f"self_attn.{n}_norm.weight", [hybrid_model.HEAD_DIM]) for n in "qk")
        yield at + "mlp.gate.weight", [EXPERTS, hybrid_model.HIDDEN]
        for e in range(EXPERTS):
            for name, shape in (("gate", (WIDTH, hybrid_model.HIDDEN)), ("up", (WIDTH, hybrid_model.HIDDEN)),
                                ("down", (hybrid_model.HIDDEN, WIDTH))):
                yield f"{at}mlp.experts.{e}.{name}_proj.weight", list(shape)


def make(made, top, zeros=None):
    demo, old = os.path.join(ROOT, "models", "demo"), hybrid_model.demo_config()
    for name in os.listdir(demo):
        if name.startswith("tokenizer"):
            shutil.copy(os.path.join(demo, name), made / name)
    config = {key: old[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")} | {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": hybrid_model.HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": hybrid_model.HEADS, "num_key_value_heads": hybrid_model.KV_HEADS,
        "head_dim": hybrid_model.HEAD_DIM, "intermediate_size": 48, "moe_intermediate_size": WIDTH, "num_experts": EXPERTS,
        "num_experts_per_tok": top, "norm_topk_prob": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "dtype": "float32"}
    (made / "config.json").write_text(json.dumps(config))
    hybrid_model.write_safetensors(made / "model.safetensors", tensors(), random.Random(11), zeros)
    return str(made)


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return make(tmp_path_factory.mktemp("usual"), 2)


@pytest.fixture(scope="module")
def one_sided(tmp_path_factory):
    """Routers that score all experts alike: every token goes to the first."""
    return make(tmp_path_factory.mktemp("one_sided"), 1, "mlp.gate.weight")


def ask(server, body):
    answer = server.ask("POST", "/v1/completions", json=body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    return [c["token_ids"] for c in answer.json()["choices"]]


def ask_all(server, times):
    with concurrent.futures.ThreadPoolExecutor(len(BODIES) * times) as pool:
        return list(pool.map(lambda body: ask(server, body), BODIES * times))


def logprobs(folder, *flags):
    """What the model makes of a given text."""
    body = dict(prompt=STORY * 3, max_tokens=1, temperature=0, echo=True, logprobs=1)
    with serving(*COMMON, *flags, model=folder) as server:
        answer = server.ask("POST", "/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["logprobs"]["token_logprobs"][1:-1]


def several_ranks(flags):
    if DEVICE != "cpu" and flags:
        pytest.skip("takes several devices")


@pytest.mark.parametrize("kind", ["usual", "one_sided"])
def test_one_rank_answers_alone_and_in_company(kind, request):
    with serving(*COMMON, model=request.getfixturevalue(kind)) as server:
        want = [ask(server, body) for body in BODIES]
        for _ in range(2):
            assert ask_all(server, 2) == want * 2


@pytest.mark.parametrize("flags", [RANKS, SLICES], ids=["whole experts", "slices"])
@pytest.mark.parametrize("kind", ["usual", "one_sided"])
def test_ranks_answer_alone_and_in_company(kind, flags, request):
    several_ranks(flags)
    folder = request.getfixturevalue(kind)
    with serving(*COMMON, *flags, model=folder) as server:
        want = [ask(server, body) for body in BODIES]
        for _ in range(2):
            assert ask_all(server, 2) == want * 2
        assert server.metric("rank_up", rank="1") == 1
        assert "ranks hold" not in server.log  # a CPU takes slices of any width
    one, two = logprobs(folder), logprobs(folder, *flags)
    assert len(one) == len(two) > 30
    assert max(abs(a - b) for a, b in zip(one, two)) < 1e-3


@pytest.mark.parametrize("flags", [(), RANKS], ids=["one rank", "two ranks"])
def test_the_load_of_experts_is_counted(usual, one_sided, flags):
    several_ranks(flags)
    for folder, top in ((usual, 2), (one_sided, 1)):
        with serving(*COMMON, "--no-prefix-cache", *flags, model=folder) as server:
            body = BODIES[0]
            answer = server.ask("POST", "/v1/completions", json=body)
            used = answer.json()["usage"]
            computed = used["prompt_tokens"] + used["completion_tokens"] - 1
            tokens, peak = (server.metric(f"moe_expert_{name}_total") for name in ("tokens", "peak_tokens"))
            # the last layer has the rows that have logits; a step may have been launched behind the last token
            least = top * (computed * (LAYERS - 1) + used["completion_tokens"])
            assert least <= tokens <= least + top * LAYERS
            if folder == one_sided:
                assert peak == EXPERTS * tokens
            else:
                assert tokens < peak < EXPERTS * tokens


@pytest.mark.parametrize("flags, words", [
    (("--expert-parallel", "--tensor-parallel-size", "3"), "expert_parallel"),
])
def test_experts_that_cannot_be_divided_are_refused(usual, start, flags, words):
    several_ranks(flags)
    server = start(*COMMON, *flags, model=usual, wait=False)
    assert server.process.wait(60) == 1, server.log
    lines = [x for x in server.log.splitlines() if "cannot start" in x]
    assert len(lines) == 1 and words in lines[0], server.log
