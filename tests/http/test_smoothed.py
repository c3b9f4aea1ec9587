"""Weights that are smoothed at start (quantization_smooth): made once, by a child, in the cache
directory, and served as the directory that `quire quantize --smooth` writes."""
import glob
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import time

import numpy as np
import pytest
from conftest import PATIENCE_S, QUIRE, ROOT, clean_environment
from test_nodes import cluster, free_port
from test_quantised import DEMO, FLAGS, TEXT, log_probabilities, numbers, quantize

INT8 = ("--quantization", "int8", "--quantization-smooth", "0.5", "--quantization-text")


@pytest.fixture
def story(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text(TEXT * 2)
    return str(path)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def long_story(tmp_path):
    """Takes seconds."""
    path = tmp_path / "long.txt"
    path.write_text(TEXT * 200)
    return str(path)


@pytest.fixture
def smoothed(start, cache):
    def begin(text, *flags, model=DEMO, form="int8", wait=True, **env):
        return start(*FLAGS, "--quantization", form, "--quantization-smooth", "0.5", "--quantization-text", text, *flags,
                     model=model, env=environment(cache) | env, wait=wait)
    return begin


def environment(cache):
    return {"XDG_CACHE_HOME": str(cache), "CACHE_DIRECTORY": ""}


def made_in(cache):
    at = cache / "quire" / "quantised"
    return sorted(os.listdir(at)) if at.exists() else []


def wait_until(holds):
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def wait_for_weights(cache):
    wait_until(lambda: glob.glob(str(cache / "quire" / "quantised" / "*.partial-*" / "model.safetensors")))


def fails(*flags, model=DEMO, cache=None, preexec=None, status=1, **env):
    """Its only line."""
    run = subprocess.run([QUIRE, "serve", *FLAGS, "--port", "0", "--model", str(model), *flags], capture_output=True, text=True,
                         timeout=PATIENCE_S, preexec_fn=preexec, check=False,
                         env=clean_environment() | (environment(cache) if cache else {}) | env)
    lines = [line for line in run.stderr.splitlines() if " info " not in line]
    assert run.returncode == status and len(lines) == 1, run.stderr
    return lines[0]


@pytest.mark.parametrize("form, options", [("int8", ()), ("int8-asymmetric", ("--asymmetric",))])
def test_it_is_what_quantize_writes(smoothed, start, cache, story, tmp_path, form, options):
    written = tmp_path / "written"
    made = quantize(DEMO, str(written), "--format", "int8", *options, "--text", story, "--smooth", "0.5")
    assert made.returncode == 0, made.stderr
    server, by_hand = smoothed(story, form=form), start(*FLAGS, model=str(written))
    assert json.loads(server.get("/v1/models"))["data"][0]["id"] == "demo"
    assert np.array_equal(log_probabilities(server), log_probabilities(by_hand))
    assert "56 of INT8" in server.log and "no effect" not in server.log
    kept, = made_in(cache)
    kept = cache / "quire" / "quantised" / kept
    for name in os.listdir(written):
        assert (kept / name).read_bytes() == (written / name).read_bytes(), name
    report = (kept / "quantise.txt").read_text()
    assert report == made.stdout
    _, before, after = numbers(report.splitlines()[-1])
    told, = [line for line in server.log.splitlines() if " quantised path=" in line]
    assert f"perplexity_before={before:g} perplexity={after:g}" in told, told
    assert server.log.count("down_proj") == 0


def test_it_is_made_once_of_the_same_files_and_text(smoothed, cache, story, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(DEMO, model)
    first = smoothed(story, model=str(model))
    assert json.loads(first.get("/v1/models"))["data"][0]["id"] == "model"
    second = smoothed(story, model=str(model))
    assert "info quantising" in first.log and "info quantising" not in second.log
    assert "quantised at an earlier start" in second.log and len(made_in(cache)) == 1
    assert np.array_equal(log_probabilities(first), log_probabilities(second))
    (model / "README.md").write_text("is not read")
    assert "earlier start" in smoothed(story, model=str(model)).log
    with open(story, "a") as f:
        f.write("x")
    for n, change in enumerate((lambda: None, lambda: os.utime(model / "model.safetensors", (1, 1)),
                                lambda: os.utime(model / "tokenizer.json", (1, 1))), 2):
        change()
        assert "info quantising" in smoothed(story, model=str(model)).log
        assert len(made_in(cache)) == n
    for more in (("--quantization-smooth", "0.4"), ("--quantization", "int8-asymmetric")):
        n += 1
        assert "info quantising" in smoothed(story, *more, model=str(model)).log
        assert len(made_in(cache)) == n


def test_ranks_nodes_and_benchmarks_read_the_same(smoothed, start, cache, story):
    alone = log_probabilities(smoothed(story))
    two = smoothed(story, "--tensor-parallel-size", "2")
    assert two.log.count("of INT8") == 2 and "no effect" not in two.log
    # inputs of products that are divided by columns are rounded in parts
    assert np.abs(log_probabilities(two) - alone).max() < 0.2
    nodes = cluster(free_port(), 2, 2)
    other = start(*nodes, *INT8, story, "--node-rank", "1", model=DEMO, env=environment(cache), wait=False)
    first = start(*nodes, *INT8, story, model=DEMO, env=environment(cache))
    assert np.array_equal(log_probabilities(first), log_probabilities(two))
    assert all("earlier start" in server.log for server in (two, first, other)) and len(made_in(cache)) == 1
    assert first.stop() == 0 and other.process.wait(PATIENCE_S) == 0
    own = cache / "of bench"
    bench = subprocess.run([QUIRE, "bench", "offline", *FLAGS, *INT8, story, "--model", DEMO, "--requests", "2", "--input-len",
                            "8", "--output-len", "4"], capture_output=True, text=True, timeout=PATIENCE_S, check=False,
                           env=clean_environment() | environment(own))
    assert bench.returncode == 0 and made_in(own) == made_in(cache), bench.stderr


def test_two_that_start_at_once_serve_the_same_directory(smoothed, cache, story):
    both = [smoothed(story, wait=False) for _ in range(2)]
    for server in both:
        server.wait_ready()
    assert len(made_in(cache)) == 1
    assert np.array_equal(*(log_probabilities(server) for server in both))


@pytest.mark.parametrize("flags, status, why", [
    (("--quantization", "int8", "--quantization-smooth", "0.5"), 2, "quantization_text is missing"),
    (("--quantization", "int8", "--quantization-text", "STORY"), 2, "quantization_smooth is missing"),
    (("--quantization-smooth", "0.5", "--quantization-text", "STORY"), 2, "goes with quantization int8 or int8-asymmetric"),
    (("--quantization", "int8-g128", *INT8[2:], "STORY"), 2, "goes with quantization int8 or int8-asymmetric"),
    (("--quantization", "fp8", *INT8[2:], "STORY"), 2, "goes with quantization int8 or int8-asymmetric"),
    ((*INT8, "STORY", "--quantization-smooth", "1"), 2, "allowed: 0 to 0.99"),
    ((*INT8, "STORY", "--load-format", "dummy"), 2, "load_format must be auto or safetensors"),
    ((*INT8, "/none.txt"), 1, "/none.txt"),
    ((*INT8, "EMPTY"), 1, "empty text"),
])
def test_what_cannot_be_together_is_refused(cache, story, tmp_path, flags, status, why):
    (tmp_path / "empty").write_text("")
    flags = [{"STORY": story, "EMPTY": str(tmp_path / "empty")}.get(flag, flag) for flag in flags]
    assert why in fails(*flags, cache=cache, status=status)
    assert made_in(cache) == []


def test_what_cannot_be_smoothed_is_refused_by_name(cache, story, tmp_path):
    int8 = str(tmp_path / "int8")
    assert quantize(DEMO, int8, "--format", "int8").returncode == 0
    golden = os.path.join(ROOT, "tests", "golden")
    modelopt = tmp_path / "modelopt"
    shutil.copytree(DEMO, modelopt)
    (modelopt / "hf_quant_config.json").write_text("{}")
    for model, why in ((int8, int8 + " is quantised already"), (modelopt, f"{modelopt} is quantised already"),
                       (os.path.join(golden, "gemma", "model.gguf"), "model.gguf is a GGUF file"),
                       (os.path.join(golden, "gpt2"), "tokenizer")):
        line = fails(*INT8, story, model=model, cache=cache)
        assert "quantization_smooth: " in line and why in line
        assert made_in(cache) == []


def test_a_disk_that_is_full_or_closed_is_told(cache, story, tmp_path):
    line = fails(*INT8, story, cache=cache,
                 preexec=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)))
    assert "model.safetensors: File too large" in line and made_in(cache) == []
    file = tmp_path / "file"
    file.write_text("")
    assert f"{file}/quire/quantised" in fails(*INT8, story, cache=file)
    assert "XDG_CACHE_HOME or HOME must be set" in fails(*INT8, story, XDG_CACHE_HOME="", CACHE_DIRECTORY="", HOME="")


@pytest.mark.parametrize("sent", (signal.SIGTERM, signal.SIGINT, signal.SIGKILL))
def test_nothing_is_left_of_a_start_that_is_ended(smoothed, cache, long_story, sent):
    server = smoothed(long_story, wait=False)
    wait_for_weights(cache)
    status = server.stop(sent)
    if sent == signal.SIGKILL:  # then the kernel ends the child
        assert status == -sent
        wait_until(lambda: made_in(cache) == [])
    else:
        assert status == 0 and made_in(cache) == []
        assert "stopped while starting" in server.log and " error " not in server.log


def test_a_child_that_is_killed_is_told(smoothed, cache, long_story):
    server = smoothed(long_story, wait=False)
    wait_for_weights(cache)
    partial, = made_in(cache)
    os.kill(int(partial.rpartition("-")[2]), signal.SIGKILL)
    assert server.process.wait(PATIENCE_S) == 1
    error, = [line for line in server.log.splitlines() if " error " in line]
    assert "quantization_smooth: ended by signal 9" in error and made_in(cache) == []


def test_systemd_waits_for_it(smoothed, tmp_path, long_story):
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(path)
        told.settimeout(PATIENCE_S)
        smoothed(long_story, wait=False, NOTIFY_SOCKET=path)
        assert told.recv(100) == b"EXTEND_TIMEOUT_USEC=900000000"
        while (state := told.recv(100)).startswith(b"EXTEND"):
            pass
        assert state == b"READY=1"
