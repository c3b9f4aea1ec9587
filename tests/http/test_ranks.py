"""One model on several ranks, with tensor or pipeline parallelism: a real server, real processes, and what happens when one of
them dies.

To keep a request running until a test acts, a rank is stopped (SIGSTOP), which holds every step until it continues."""
import json
import os
import signal
import subprocess
import time

import httpx
import pytest

from alike import assert_alike, assert_beams_alike
from conftest import PATIENCE_S, QUIRE, ROOT
from raw import Reader, events, post

DEMO = os.path.join(ROOT, "models", "demo")
FLAGS = ("--device", "cpu", "--threads", "2", "--kv-blocks", "512")
STORY = dict(prompt="Once upon a time, there was a little fox", temperature=0)


def stat(pid):
    """(state, parent) of a process; None if it does not exist or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            state, parent = f.read().rsplit(")", 1)[1].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else (state, int(parent))


def cut(ranks, stages=1):
    return "--tensor-parallel-size", str(ranks), "--pipeline-parallel-size", str(stages)


def ranks_of(server):
    pids = [int(d) for d in os.listdir("/proc") if d.isdigit()]
    return sorted(p for p in pids if (stat(p) or ("", 0))[1] == server.process.pid)


def wait_for(what, condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def gone(pids):
    wait_for(f"ranks {pids} are still there", lambda: not any(stat(p) for p in pids))


def ask(server, **fields):
    answer = httpx.post(server.url + "/v1/completions", json=STORY | fields, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stop_process(pid):
    os.kill(pid, signal.SIGSTOP)
    wait_for("a rank does not stop", lambda: stat(pid)[0] == "T")


def stream(server, **fields):
    """Start a stream; returns the reader of its connection."""
    sock = server.connect(timeout=PATIENCE_S)
    sock.sendall(post("/v1/completions", STORY | dict(stream=True, max_tokens=20, ignore_eos=True) | fields))
    reader = Reader(sock)
    assert reader.head()[0] == 200
    return reader


def held_stream(server):
    """A stream that waits for a stopped rank, and that rank."""
    rank = ranks_of(server)[0]
    stop_process(rank)
    reader = stream(server)
    server.wait_metric("num_requests_running", 1)
    return reader, rank


def assert_same(one, many, ranks, **fields):
    """Pipeline stages compute exactly what one process does. Tensor parallelism adds in another order;
    with top_p a token at the threshold may drop out, and its margin is not visible."""
    if "temperature" in fields:
        fields |= dict(return_token_ids=True, **{} if ranks == 1 else dict(top_p=1))
    fields = dict(logprobs=0) | fields
    want, got = ask(one, **fields), ask(many, **fields)
    if ranks == 1:
        assert got["choices"] == want["choices"], fields
        assert got["usage"]["completion_tokens"] == want["usage"]["completion_tokens"]
    elif fields.get("use_beam_search"):
        assert_beams_alike(got, want)
    else:
        assert_alike(got, want, temperature=fields.get("temperature", 0),
                     seed=fields.get("seed", 0))


@pytest.fixture(scope="module")
def alone(isa):
    from conftest import Server
    s = Server(*FLAGS, model=DEMO)
    yield s
    assert s.stop() == 0, s.log


CONSTRAINED = dict(max_tokens=16, structured_outputs={"regex": "(one|two|three) dogs? and [a-f]{4}"})
MANY = dict(max_tokens=8, n=24, best_of=24, temperature=0.8, seed=7)  # enough sequences for the stages to work concurrently


@pytest.mark.parametrize("ranks, stages", [(2, 1), (4, 1), (1, 2), (1, 3), (2, 2)])
def test_answers_are_those_of_one_rank(start, alone, ranks, stages):
    s = start(*FLAGS, *cut(ranks, stages), model=DEMO)
    pids, n = ranks_of(s), ranks * stages
    assert len(pids) == n - 1
    for fields in (dict(max_tokens=24), dict(max_tokens=12, n=3, temperature=0.8, seed=7),
                   dict(max_tokens=10, n=2, use_beam_search=True, best_of=4), dict(max_tokens=3, echo=True, logprobs=1), MANY,
                   dict(prompt=STORY["prompt"] * 20, max_tokens=5), CONSTRAINED):
        assert_same(alone, s, ranks, **fields)
    assert "ranks" in s.log
    assert s.metric("rank_up") == n
    s.wait_idle()
    assert s.stop() == 0, s.log
    gone(pids)


@pytest.mark.parametrize("ranks, stages", [(2, 1), (1, 2)])
def test_swapping_and_prefixes_stay_the_same(start, alone, ranks, stages):
    s = start("--device", "cpu", "--threads", "2", "--kv-blocks", "12", "--swap-space", "64MiB", "--preemption", "swap",
              *cut(ranks, stages), model=DEMO)
    prompts = [f"The {animal} went to the" for animal in ("dog", "cat", "bird", "bear", "fish", "frog", "cow", "hen")]
    body = dict(prompt=prompts, max_tokens=30, ignore_eos=True)
    assert_same(alone, s, ranks, **body)
    assert s.metric("num_preemptions_total", mode="swap") > 0
    assert ask(s, **body | dict(prompt=prompts[0] * 4, max_tokens=1))["choices"]
    s.wait_idle()
    assert s.stop() == 0, s.log


@pytest.mark.parametrize("ranks, stages", [(4, 1), (1, 3), (2, 2)])
def test_a_killed_rank_ends_the_service_and_tells_why(start, ranks, stages):
    s = start(*FLAGS, *cut(ranks, stages), model=DEMO)
    pids = ranks_of(s)
    reader, rank = held_stream(s)
    began = time.monotonic()
    os.kill(rank, signal.SIGKILL)
    body = b"".join(reader.chunks())
    last = [json.loads(e) for e in events(body) if e != "[DONE]"][-1]
    assert "error" in last, body[-500:]
    assert s.process.wait(PATIENCE_S) == 1
    print(f"a killed rank: client told, process gone after {time.monotonic() - began:.2f} s")
    gone(pids)
    reasons = [line for line in s.log.splitlines() if "was ended by signal 9" in line]
    assert reasons and all("rank " in line for line in reasons), s.log


def test_a_rank_killed_while_nothing_runs_ends_it_too(start):
    s = start(*FLAGS, "--tensor-parallel-size", "2", model=DEMO)
    ask(s, max_tokens=3)
    s.wait_idle()
    os.kill(ranks_of(s)[0], signal.SIGKILL)
    assert s.process.wait(PATIENCE_S) == 1
    assert "was ended by signal 9" in s.log


@pytest.mark.parametrize("ranks, stages, why", [(2, 1, "rank 1 did not answer"), (1, 2, "rank 1 gave no results")])
def test_a_rank_that_hangs_ends_the_service(start, ranks, stages, why):
    s = start(*FLAGS, *cut(ranks, stages), "--step-timeout", "1s", model=DEMO)
    reader, rank = held_stream(s)
    assert b"error" in b"".join(reader.chunks())
    assert s.process.wait(PATIENCE_S) == 1
    assert why in s.log or "rank 1 did not answer" in s.log, s.log
    gone([rank])


@pytest.mark.parametrize("ranks, stages", [(2, 1), (1, 2)])
def test_sigterm_drains_over_all_ranks(start, ranks, stages):
    s = start(*FLAGS, *cut(ranks, stages), "--shutdown-timeout", str(PATIENCE_S), model=DEMO)
    reader, rank = held_stream(s)
    s.process.send_signal(signal.SIGTERM)
    os.kill(rank, signal.SIGTERM)  # as systemd does: to every process of the unit
    wait_for("the server does not drain", lambda: "draining" in s.log)
    os.kill(rank, signal.SIGCONT)
    pieces = [json.loads(e) for e in events(b"".join(reader.chunks())) if e != "[DONE]"]
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"
    assert s.process.wait(PATIENCE_S) == 0, s.log
    gone([rank])


def test_two_interrupts_end_all_at_once(start):
    s = start(*FLAGS, "--tensor-parallel-size", "2", model=DEMO)
    pids = ranks_of(s)
    held_stream(s)
    for pid in (s.process.pid, *pids):  # as a terminal does: to the whole group
        os.kill(pid, signal.SIGINT)
    wait_for("the server does not drain", lambda: "draining" in s.log)
    s.process.send_signal(signal.SIGINT)
    assert s.process.wait(PATIENCE_S) == 128 + signal.SIGINT
    gone(pids)


def test_ranks_do_not_outlive_a_killed_server(start):
    s = start(*FLAGS, "--tensor-parallel-size", "4", model=DEMO)
    pids = ranks_of(s)
    assert len(pids) == 3
    s.process.kill()
    s.process.wait(PATIENCE_S)
    gone(pids)


@pytest.mark.parametrize("flags, why", [
    (["--tensor-parallel-size", "5"], "tensor_parallel_size 5 does not divide the model"),
    (["--tensor-parallel-size", "2", "--device", "cuda"], "device cuda: "),
    (["--pipeline-parallel-size", "64"], "pipeline_parallel_size 64 is more than the"),
    (["--pipeline-parallel-size", "2", "--tensor-parallel-size", "5"], "tensor_parallel_size 5 does not divide the model"),
    (["--tensor-parallel-size", "2", "--max-model-len", "99999"], "made for"),
    (["--tensor-parallel-size", "2", "--kv-blocks", "2000000000"], "are free"),
])
def test_what_cannot_be_is_one_line(flags, why):
    bad = subprocess.run([QUIRE, "serve", "--device", "cpu", "--port", "0", "--model", DEMO, *flags],
                         capture_output=True, text=True, timeout=PATIENCE_S, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    errors = [line for line in bad.stderr.splitlines() if " error " in line]
    assert bad.returncode == 1 and len(errors) == 1 and why in errors[0], bad.stderr


def test_a_rank_is_not_started_by_hand():
    bad = subprocess.run([QUIRE, "rank"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert bad.returncode == 2 and "started by quire serve" in bad.stderr
