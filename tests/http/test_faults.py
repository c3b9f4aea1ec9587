"""System calls that fail: a request may be lost, but the server goes on and leaks nothing."""
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

import raw
from conftest import PACED, PATIENCE_S, QUIRE, ROOT

CC = shutil.which("cc")


def is_sanitized():
    with open(QUIRE, "rb") as f:
        program = f.read()
    return b"__asan_init" in program or b"__tsan_init" in program


pytestmark = pytest.mark.skipif(CC is None or is_sanitized(), reason="needs a C compiler, and a program without a sanitizer's own calls")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("faults") / "faults.so")
    subprocess.run([CC, "-shared", "-fPIC", "-O1", "-o", path, os.path.join(ROOT, "tests", "http", "faults.c"), "-ldl"], check=True)
    return path


def ask(server, i):
    """One request; whether it was answered whole."""
    body = {"prompt": f"a {i}", "max_tokens": 8, "stream": i % 2 == 0}
    try:
        with server.connect() as s:
            s.sendall(raw.post("/v1/completions", body, "Connection: close"))
            status, _, answer = raw.Reader(s).answer()
            return status == 200 and (i % 2 or b"[DONE]" in answer)
    except (OSError, EOFError, ValueError, IndexError):
        return False


@pytest.mark.parametrize("faults", ["accept=3", "recv=5", "send=5", "epoll=2", "epoll_ctl=7", "accept=5 recv=9 send=11 epoll=3"])
def test_a_server_outlives_failing_calls(start, library, tmp_path, faults):
    trouble = tmp_path / "trouble"
    server = start(env={"LD_PRELOAD": library, "FAULTS": faults, "FAULTS_FILE": str(trouble)})
    descriptors = f"/proc/{server.process.pid}/fd"
    assert ask(server, 0)
    trouble.touch()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: ask(server, i), range(120)))
    trouble.unlink()
    assert all(ask(server, i) for i in range(10)), server.log
    server.wait_idle()
    server.wait_metric("http_connections", 1)  # the one for metrics
    assert len(os.listdir(descriptors)) < 40
    assert server.stop() == 0, server.log


def test_a_set_that_lets_nothing_out_ends_the_server_with_its_reason(start, library, tmp_path):
    """libmicrohttpd cannot go on then: exit status 1 and a log line, no abort."""
    trouble = tmp_path / "trouble"
    server = start(env={"LD_PRELOAD": library, "FAULTS": "epoll_del=1", "FAULTS_FILE": str(trouble)}, model=PACED)
    trouble.touch()
    ask(server, 0)
    assert server.process.wait(PATIENCE_S) == 1, server.log
    assert "microhttpd gave up" in server.log and "ready" in server.log


@pytest.mark.parametrize("faults", ["mmap=1", "read=1"])
def test_a_model_that_cannot_be_read_is_refused(library, start, faults, tmp_path):
    """A failure from the first or any later call on: the model is loaded, or one sentence says why not."""
    for every in (1, 2, 5):
        server = start(model=os.path.join(ROOT, "models", "demo"), wait=False,
                       env={"LD_PRELOAD": library, "FAULTS": faults.replace("1", str(every))})
        try:
            server.wait_ready(120)
        except AssertionError:
            assert server.process.wait(60) in (1, 2), server.log
            assert "error" in server.log, server.log
        else:
            assert server.stop() == 0, server.log


@pytest.mark.parametrize("ranks, stages", [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_a_jump_of_the_wall_clock_ends_nothing(start, library, tmp_path, ranks, stages, seconds):
    jump = tmp_path / "jump"
    server = start("--device", "cpu", "--threads", "2", "--kv-blocks", "64", "--step-timeout", "60",
                   "--tensor-parallel-size", str(ranks), "--pipeline-parallel-size", str(stages),
                   model=os.path.join(ROOT, "models", "demo"),
                   env={"LD_PRELOAD": library, "FAULTS_CLOCK": str(seconds), "FAULTS_FILE": str(jump)})

    def ask():
        a = server.ask("POST", "/v1/completions", json=dict(prompt="Once upon a time", max_tokens=8, temperature=0))
        assert a.status_code == 200, a.text + server.log
        return a.json()

    before = ask()
    jump.touch()
    during = ask()
    assert abs(during["created"] - before["created"] - seconds) < 600  # the shim works: this is a time of day
    jump.unlink()
    after = ask()
    assert before["choices"] == during["choices"] == after["choices"]
    assert server.get("/health") == '{"status":"ready"}'
    assert server.stop() == 0, server.log
