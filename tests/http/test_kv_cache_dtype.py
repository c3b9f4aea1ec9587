"""Caches of 8 bits: a text must not depend on what became of its blocks meanwhile."""
import concurrent.futures
import functools
import os
import re

import pytest

from conftest import ROOT, serving

DEMO = os.path.join(ROOT, "models", "demo")
COMMON = ("--device", "cpu", "--threads", "1", "--block-size", "4", "--max-num-seqs", "8",
          "--max-num-batched-tokens", "32")
STORY = "Once upon a time there was a little dog who lived by the sea. Every day he went "
BODIES = [
    dict(prompt=STORY * 3 + "to the beach", max_tokens=60, temperature=0),
    dict(prompt=STORY * 2, max_tokens=60, temperature=0.8, seed=3, n=3),
    dict(prompt=STORY, max_tokens=50, n=2, best_of=2, use_beam_search=True, temperature=0),
    dict(prompt=STORY * 3 + "to the wood", max_tokens=40, temperature=0.7, seed=9, best_of=3, n=2),
    dict(prompt="The cat", max_tokens=90, temperature=0, ignore_eos=True),
]
# Texts that one request starts in the same step, and that together outgrow a small pool: some
# are preempted however slow the machine is.
CROWD = dict(prompt=["The cat", "The dog", "Once upon"], max_tokens=90, temperature=0.8, seed=4,
             n=2, ignore_eos=True)
TYPES = ("fp8", "int8")


def ask(server, body):
    answer = server.ask("POST", "/v1/completions", json=body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    return [c["token_ids"] for c in answer.json()["choices"]]


@functools.cache
def alone(dtype, ranks="1"):
    """Each answer of a server that keeps every block, one after the other; the crowd's texts."""
    with serving(*COMMON, "--kv-cache-dtype", dtype, "--no-prefix-cache", "--kv-blocks", "2000",
                 "--tensor-parallel-size", ranks, model=DEMO) as server:
        crowd = [ask(server, CROWD | {"prompt": prompt}) for prompt in CROWD["prompt"]]
        return [ask(server, body) for body in BODIES], sum(crowd, [])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("flags", [
    ("--kv-blocks", "2000"),
    ("--kv-blocks", "72", "--preemption", "recompute"),
    ("--kv-blocks", "72", "--preemption", "swap", "--swap-space", "64MiB"),
    ("--kv-blocks", "72", "--preemption", "swap", "--swap-space", "64MiB",
     "--pipeline-parallel-size", "2"),
    ("--kv-blocks", "72", "--preemption", "recompute", "--tensor-parallel-size", "2"),
], ids=["roomy", "recompute", "swap", "stages", "ranks"])
def test_texts_are_the_same_after_hits_and_preemptions(dtype, flags):
    want, crowd = alone(dtype, "2" if "--tensor-parallel-size" in flags else "1")
    with serving(*COMMON, "--kv-cache-dtype", dtype, *flags, model=DEMO) as server:
        assert [ask(server, body) for body in BODIES] == want
        with concurrent.futures.ThreadPoolExecutor(2 * len(BODIES)) as pool:
            assert list(pool.map(lambda body: ask(server, body), BODIES * 2)) == want * 2
        assert server.metric("prefix_cache_hits_total") > 0
        preempted = server.metric("num_preemptions_total")
        assert ask(server, CROWD) == crowd
        assert flags[1] == "2000" or server.metric("num_preemptions_total") > preempted


def blocks(dtype):
    """Blocks, and bytes of a token, in a cache of 4 MiB."""
    with serving("--device", "cpu", "--kv-cache-memory", "4MiB", "--kv-cache-dtype", dtype,
                 model=DEMO) as server:
        page = server.ask("GET", "/metrics").text
    labels = re.search(r"cache_config_info\{(.*)\}", page)[1]
    assert f'cache_dtype="{dict(bf16="bfloat16", fp8_e4m3="fp8").get(dtype, dtype)}"' in labels
    return (int(re.search(r'num_gpu_blocks="(\d+)"', labels)[1]),
            int(re.search(r'bytes_per_token="(\d+)"', labels)[1]))


def test_fp8_holds_twice_the_blocks_of_bf16():
    wide, narrow, scaled = blocks("bf16"), blocks("fp8_e4m3"), blocks("int8")
    assert narrow[0] // 2 == wide[0] and wide[1] == 2 * narrow[1]
    assert narrow[1] < scaled[1] < 0.6 * wide[1] and wide[0] < scaled[0] < narrow[0]


def test_speculation_gives_the_same_texts():
    want, _ = alone("fp8")
    with serving(*COMMON, "--kv-cache-dtype", "fp8", "--kv-blocks", "2000", "--speculate", "suffix",
                 model=DEMO) as server:
        for _ in range(2):
            assert [ask(server, body) for body in BODIES] == want
