"""Device failures end with one clear line and exit status 1, and harm no other process or request. With
QUIRE_GPU_DEVICE=cpu the tests that make sense on a CPU run there."""
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys

import httpx
import pytest

from conftest import DEVICE, ROOT, Server, http_conftest

DEMO = os.path.join(ROOT, "models", "demo")
SMALL = ("--kv-cache-memory", "64MiB", "--max-num-seqs", "64", "--swap-space", "0")
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU can do this")


def refused(*flags, env=None, device=DEVICE, model=DEMO):
    """The one error line of a server that refuses to start."""
    server = Server("--device", device, *flags, model=model, env=env, wait=False)
    assert server.process.wait(120) == 1, server.log
    errors = [line for line in server.log.splitlines() if " error " in line]
    assert len(errors) == 1, server.log
    return errors[0]


def complete(server, prompt, **fields):
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
    return httpx.post(server.url + "/v1/completions", json=body, timeout=120)


def text(answer):
    assert answer.status_code == 200, answer.text
    return [c["text"] for c in answer.json()["choices"]]


def test_longer_context_than_the_cache_holds():
    said = refused("--kv-cache-memory", "1MiB", "--max-model-len", "1024")
    assert "max_model_len is 1024, but the KV cache holds" in said


def test_larger_cache_than_there_is_memory():
    said = refused("--kv-cache-memory", "4000GiB")
    assert "are free" in said


@on_gpu
def test_no_gpu():
    assert "no usable GPU" in refused(env={"CUDA_VISIBLE_DEVICES": ""})
    server = Server("--device", "auto", *SMALL, model=DEMO, env={"CUDA_VISIBLE_DEVICES": ""})
    try:
        assert len(text(complete(server, "Once upon a time"))) == 1
    finally:
        assert server.stop() == 0


HOG = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, where = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0 and cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
size = 1 << 36
while size >= 1 << 20:
    if cuda.cuMemAlloc_v2(ctypes.byref(where), ctypes.c_size_t(size)) != 0:
        size >>= 1
print("full", flush=True)
sys.stdin.read()
"""


# Requests that make a step's lists as long as possible.
LARGE_STEPS = [
    {"allowed_token_ids": [3 + i % 200 for i in range(65536)], "max_tokens": 8},
    {"logit_bias": {str(i): 1 for i in range(3, 253)}, "presence_penalty": 0.5, "repetition_penalty": 1.1, "max_tokens": 60},
    {"use_beam_search": True, "n": 16, "logprobs": 5, "max_tokens": 12},
]


@on_gpu
def test_a_full_device():
    """Another process takes all remaining memory. A running server goes on, even with step sizes and list lengths not seen
    before; a new server is refused with a clear message."""
    server = Server("--device", DEVICE, *SMALL, model=DEMO)
    try:
        before = text(complete(server, "The little dog"))
        hog = subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert hog.stdout.readline() == "full\n"
            with concurrent.futures.ThreadPoolExecutor(24) as pool:
                for n in (3, 9, 24):
                    answers = list(pool.map(lambda _: complete(server, "The little dog", max_tokens=40), range(n)))
                    assert all(len(text(a)[0]) > 0 for a in answers)
                for fields in LARGE_STEPS:
                    answers = list(pool.map(lambda _: complete(server, "The little dog", **fields), range(24)))
                    assert all(len(text(a)[0]) > 0 for a in answers)
            said = refused(*SMALL)
            assert "memory" in said or "no room" in said
        finally:
            hog.communicate("")
        assert text(complete(server, "The little dog")) == before
    finally:
        assert server.stop() == 0, server.log


def poisoned_model(folder, token):
    """The bundled model with a separate output head, and NaN as the embedding of `token`."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(os.path.join(DEMO, name), folder)
    with open(os.path.join(DEMO, "config.json")) as f:
        config = json.load(f)
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))
    with open(os.path.join(DEMO, "model.safetensors"), "rb") as f:
        raw = f.read()
    n = int.from_bytes(raw[:8], "little")
    head, data = json.loads(raw[8:8 + n]), bytearray(raw[8 + n:])
    name = "model.embed_tokens.weight"
    first, end = head[name]["data_offsets"]
    assert head[name]["dtype"] == "BF16"
    head["lm_head.weight"] = {**head[name], "data_offsets": [len(data), len(data) + end - first]}
    data += data[first:end]
    row = 2 * config["hidden_size"]
    data[first + token * row:first + (token + 1) * row] = b"\xff\x7f" * config["hidden_size"]
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return str(folder)


@pytest.mark.parametrize("exact", ["true", "false"])
def test_not_a_number_ends_its_request_alone(tmp_path, exact):
    """Its blocks are reused by concurrent and later requests, which must not be affected."""
    server = Server("--device", DEVICE, "--kv-blocks", "24", "--max-num-seqs", "16", "--swap-space", "0",
                    "--prefix-cache", "false", "--deterministic", exact, model=poisoned_model(tmp_path, 77))
    try:
        good = [200 + i for i in range(19)]
        want = text(complete(server, good))
        jobs = [good, good[:7] + [77] + good[7:]] * 8
        with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
            answers = list(pool.map(lambda prompt: complete(server, prompt), jobs))
        for prompt, answer in zip(jobs, answers):
            if prompt is good:
                assert text(answer) == want or (exact == "false" and text(answer))
            else:
                assert answer.status_code == 500 and "NaN or infinite" in answer.text, answer.text
        assert text(complete(server, good)) == want
        sampled = complete(server, jobs[1], temperature=0.8, top_p=0.9, top_k=20, n=2)
        assert sampled.status_code == 500, sampled.text
        beams = complete(server, jobs[1], n=2, use_beam_search=True)
        assert beams.status_code == 500, beams.text
        assert text(complete(server, good)) == want
    finally:
        assert server.stop() == 0, server.log


@pytest.fixture
def lost_device(tmp_path):
    """A server whose device is lost in mid-step: a plugin that wraps the real one and sends an operation to an invalid address."""
    if not os.path.exists(os.path.join(ROOT, "kernels", "backend.h")) or shutil.which("cc") is None:
        pytest.skip("needs a C compiler and the sources")
    quire = os.path.realpath(http_conftest.QUIRE)
    shutil.copy(quire, tmp_path / "quire")
    subprocess.run(["cc", "-std=c11", "-D_GNU_SOURCE", "-shared", "-fPIC", "-I", ROOT, "-o", str(tmp_path / "libquire_cuda.so"),
                    os.path.join(ROOT, "tests", "gpu", "faulty.c"), "-ldl"], check=True)

    def start(steps):
        real, http_conftest.QUIRE = http_conftest.QUIRE, str(tmp_path / "quire")
        try:
            return Server("--device", DEVICE, *SMALL, model=DEMO,
                          env={"QUIRE_TEST_PLUGIN": os.path.join(os.path.dirname(quire), "libquire_cuda.so"),
                               "QUIRE_TEST_LOST_AT": str(steps)})
        finally:
            http_conftest.QUIRE = real

    return start


@on_gpu
def test_a_device_lost_in_mid_step(lost_device):
    """Every request ends with an error, and the process with status 1, so that systemd starts it again."""
    server = lost_device(400)
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda i: try_complete(server, "Once upon a time", max_tokens=900), range(8)))
        assert all(a is None or a.status_code >= 500 for a in answers), answers
        assert any(a is not None for a in answers)
        assert server.process.wait(120) == 1, server.log
        assert "engine died" in server.log and "illegal memory access" in server.log, server.log
    finally:
        if server.process.poll() is None:
            server.stop()


def try_complete(server, prompt, **fields):
    """None: the connection got no answer."""
    try:
        return complete(server, prompt, **fields)
    except httpx.TransportError:
        return None
