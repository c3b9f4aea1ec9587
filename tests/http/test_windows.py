"""Models that mix layers with and without a sliding window, or chunks of attention: their KV groups must change no text."""
import functools
import json
import os
import shutil

import pytest

from company import ask, ask_crowd_apart, ask_each, check_company
from conftest import ROOT, serving
from head_models import write_mixed

WINDOW = 24
COMMON = ("--device", "cpu", "--threads", "1", "--block-size", "4", "--max-num-seqs", "8",
          "--max-num-batched-tokens", "32")


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


@functools.cache
def alone(folder, ranks):
    """The answers of a server with one KV group, where every block is kept, one after the other."""
    with serving(*COMMON, "--kv-policy", "orca-max", "--tensor-parallel-size", ranks,
                 model=folder) as server:
        return ask_each(server), ask_crowd_apart(server)


@pytest.fixture(scope="module")
def chunked(tmp_path_factory):
    """Llama 4 with chunks of 24 tokens in three layers of four, of random weights."""
    return str(write_mixed(tmp_path_factory.mktemp("chunked") / "model", "llama4"))


@pytest.mark.parametrize("flags", [
    ("--kv-blocks", "2000"),
    ("--kv-blocks", "220", "--preemption", "recompute"),
    ("--kv-blocks", "220", "--preemption", "swap", "--swap-space", "64MiB"),
    ("--kv-blocks", "220", "--preemption", "recompute", "--no-prefix-cache", "--policy", "fair"),
    ("--kv-blocks", "240", "--preemption", "swap", "--swap-space", "64MiB", "--pipeline-parallel-size", "2"),
    ("--kv-blocks", "220", "--preemption", "recompute", "--tensor-parallel-size", "2"),
], ids=["roomy", "recompute", "swap", "no cache", "stages", "ranks"])
def test_texts_are_those_of_one_group(folder, flags):
    want, crowd = alone(folder, "2" if "--tensor-parallel-size" in flags else "1")
    with serving(*COMMON, *flags, model=folder) as server:
        check_company(server, want, crowd, rounds=2, preempts=flags[1] != "2000")
        if "--no-prefix-cache" not in flags:
            assert server.metric("prefix_cache_hits_total") > 0


def test_a_long_text_holds_its_window_alone(folder):
    """With two layers of eight that see all, a text of 1,000 tokens fits into a pool where it would not
    if the others kept their blocks."""
    body = dict(prompt="The dog", max_tokens=900, temperature=0, ignore_eos=True)
    # four groups of two layers: 226 blocks without a window, and few in each of the others
    with serving(*COMMON, "--kv-blocks", "300", model=folder) as server:
        assert len(ask(server, body)[0]) == 900


CHUNKS = ("--load-format", "dummy", "--dtype", "float32")


@functools.cache
def alone_in_chunks(folder):
    with serving(*COMMON, *CHUNKS, "--kv-policy", "orca-max", model=folder) as server:
        return ask_each(server), ask_crowd_apart(server)


@pytest.mark.parametrize("flags", [
    ("--kv-blocks", "220", "--preemption", "recompute"),
    ("--kv-blocks", "220", "--preemption", "swap", "--swap-space", "64MiB"),
], ids=["recompute", "swap"])
def test_texts_of_chunks_are_those_of_one_group(chunked, flags):
    want, crowd = alone_in_chunks(chunked)
    with serving(*COMMON, *CHUNKS, *flags, model=chunked) as server:
        check_company(server, want, crowd, rounds=2)
        assert server.metric("prefix_cache_hits_total") > 0


def test_a_long_text_holds_its_chunk_alone(chunked):
    """With one layer of four that sees all, a text of 900 tokens takes 226 blocks for it, and ten at most for
    each of the others."""
    body = dict(prompt="The dog", max_tokens=900, temperature=0, ignore_eos=True)
    with serving(*COMMON, *CHUNKS, "--kv-blocks", "280", model=chunked) as server:
        assert len(ask(server, body)[0]) == 900
