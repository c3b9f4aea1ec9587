"""Caches of 8 bits: a text must not depend on what became of its blocks meanwhile."""
import functools
import os
import re

import pytest

from company import ask_crowd_apart, ask_each, check_company
from conftest import ROOT, serving

DEMO = os.path.join(ROOT, "models", "demo")
COMMON = ("--device", "cpu", "--threads", "1", "--block-size", "4", "--max-num-seqs", "8",
          "--max-num-batched-tokens", "32")
TYPES = ("fp8", "int8")


@functools.cache
def alone(dtype, ranks="1"):
    """Each answer of a server that keeps every block, one after the other; the crowd's texts."""
    with serving(*COMMON, "--kv-cache-dtype", dtype, "--no-prefix-cache", "--kv-blocks", "2000",
                 "--tensor-parallel-size", ranks, model=DEMO) as server:
        return ask_each(server), ask_crowd_apart(server)


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
        check_company(server, want, crowd, preempts=flags[1] != "2000")
        assert server.metric("prefix_cache_hits_total") > 0


def blocks(dtype, *flags, stored=None):
    """Blocks, and bytes of a token, in a cache of 4 MiB."""
    with serving("--device", "cpu", "--kv-cache-memory", "4MiB", "--kv-cache-dtype", dtype, *flags,
                 model=DEMO) as server:
        page = server.ask("GET", "/metrics").text
    labels = re.search(r"cache_config_info\{(.*)\}", page)[1]
    stored = stored or dict(bf16="bfloat16", fp8_e4m3="fp8").get(dtype, dtype)
    assert f'cache_dtype="{stored}"' in labels
    return (int(re.search(r'num_gpu_blocks="(\d+)"', labels)[1]),
            int(re.search(r'bytes_per_token="(\d+)"', labels)[1]))


def test_fp8_holds_twice_the_blocks_of_bf16():
    wide, narrow, scaled = blocks("bf16"), blocks("fp8_e4m3"), blocks("int8")
    assert narrow[0] // 2 == wide[0] and wide[1] == 2 * narrow[1]
    assert narrow[1] < scaled[1] < 0.6 * wide[1] and wide[0] < scaled[0] < narrow[0]


def test_a_cpu_caches_bf16_beside_weights_of_16_bits():
    wide, narrow = blocks("float32"), blocks("auto", stored="bfloat16")
    assert narrow == blocks("bf16") and narrow == (2 * wide[0], wide[1] // 2)
    assert blocks("auto", "--dtype", "float32", stored="float32") == wide
    assert blocks("auto", "--dtype", "float16", stored="bfloat16") == narrow


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_wide_caches_give_the_same_texts_in_company(dtype):
    """Of any chunk of a prompt, of a prefix that was kept, and of neighbours."""
    want, crowd = alone(dtype)
    with serving(*COMMON, "--kv-cache-dtype", dtype, "--kv-blocks", "72", "--preemption",
                 "recompute", model=DEMO) as server:
        check_company(server, want, crowd, preempts=True)


def test_speculation_gives_the_same_texts():
    want, _ = alone("fp8")
    with serving(*COMMON, "--kv-cache-dtype", "fp8", "--kv-blocks", "2000", "--speculate", "suffix",
                 model=DEMO) as server:
        for _ in range(2):
            assert ask_each(server) == want
