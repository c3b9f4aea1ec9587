"""A model that mixes layers with and without a sliding window: its KV groups must change no text."""
import concurrent.futures
import functools
import json
import os
import shutil

import pytest

from conftest import ROOT, serving

WINDOW = 24
COMMON = ("--device", "cpu", "--threads", "1", "--block-size", "4", "--max-num-seqs", "8",
          "--max-num-batched-tokens", "32")
STORY = "Once upon a time there was a little dog who lived by the sea. Every day he went "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The bundled model with a window in three layers of four."""
    made, demo = tmp_path_factory.mktemp("windowed"), os.path.join(ROOT, "models", "demo")
    for name in os.listdir(demo):
        if name != "config.json":
            shutil.copy(os.path.join(demo, name), made / name)
    with open(os.path.join(demo, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW,
               "layer_types": [kinds[i % 4] for i in range(config["num_hidden_layers"])]}
    (made / "config.json").write_text(json.dumps(config))
    return str(made)


BODIES = [
    dict(prompt=STORY * 3 + "to the beach", max_tokens=60, temperature=0),
    dict(prompt=STORY * 2, max_tokens=80, temperature=0.8, seed=3, n=3),
    dict(prompt=STORY * 2 + "home", max_tokens=70, temperature=1, seed=5, repetition_penalty=1.1,
         frequency_penalty=0.5),
    dict(prompt=STORY, max_tokens=50, n=2, best_of=2, use_beam_search=True, temperature=0),
    dict(prompt=STORY * 3 + "to the wood", max_tokens=40, temperature=0.7, seed=9, best_of=3, n=2),
    dict(prompt="The cat", max_tokens=90, temperature=0, ignore_eos=True),
]


def ask(server, body):
    answer = server.ask("POST", "/v1/completions", json=body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    return [c["token_ids"] for c in answer.json()["choices"]]


def ask_all(server, times=1):
    with concurrent.futures.ThreadPoolExecutor(len(BODIES) * times) as pool:
        return list(pool.map(lambda body: ask(server, body), BODIES * times))


@functools.cache
def alone(folder, ranks):
    """Each answer of a server with one KV group, where every block is kept, one after the other."""
    with serving(*COMMON, "--kv-policy", "orca-max", "--tensor-parallel-size", ranks, model=folder) as server:
        return [ask(server, body) for body in BODIES]


@pytest.mark.parametrize("flags", [
    ("--kv-blocks", "2000"),
    ("--kv-blocks", "220", "--preemption", "recompute"),
    ("--kv-blocks", "220", "--preemption", "swap", "--swap-space", "64MiB"),
    ("--kv-blocks", "220", "--preemption", "recompute", "--no-prefix-cache", "--policy", "fair"),
    ("--kv-blocks", "240", "--preemption", "swap", "--swap-space", "64MiB", "--pipeline-parallel-size", "2"),
    ("--kv-blocks", "220", "--preemption", "recompute", "--tensor-parallel-size", "2"),
], ids=["roomy", "recompute", "swap", "no cache", "stages", "ranks"])
def test_texts_are_those_of_one_group(folder, flags):
    want = alone(folder, "2" if "--tensor-parallel-size" in flags else "1")
    with serving(*COMMON, *flags, model=folder) as server:
        assert [ask(server, body) for body in BODIES] == want
        preempted = server.metric("num_preemptions_total")
        for _ in range(2):
            assert ask_all(server, 2) == want * 2
        if flags[1] != "2000":
            assert server.metric("num_preemptions_total") > preempted
        if "--no-prefix-cache" not in flags:
            assert server.metric("prefix_cache_hits_total") > 0


def test_a_long_text_holds_its_window_alone(folder):
    """With two layers of eight that see all, a text of 1,000 tokens fits into a pool where it would not
    if the others kept their blocks."""
    body = dict(prompt="The dog", max_tokens=900, temperature=0, ignore_eos=True)
    # four groups of two layers: 226 blocks without a window, and few in each of the others
    with serving(*COMMON, "--kv-blocks", "300", model=folder) as server:
        assert len(ask(server, body)[0]) == 900
