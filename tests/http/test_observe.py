"""Observability: the log line of a request, traces, SIGUSR1, a crash, the dashboard."""
import json
import os
import re
import signal
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from conftest import PATIENCE_S, QUIRE, ROOT
from raw import post

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


def wait_line(s, *parts):
    """The first log line that contains all of the parts."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for line in s.log.splitlines():
            if all(part in line for part in parts):
                return line
        assert time.monotonic() < deadline, s.log
        time.sleep(0.02)


def fields(line):
    return dict(re.findall(r"(\w+)=(\S+)", line))


# ---- a request's line ----

def test_line_of_a_request(start):
    s = start(model="null:2000")
    prompt = "twenty tokens or more of a prompt that fill a block or two"
    for name in ("first", "second"):
        a = s.ask("POST", "/v1/completions", json=dict(prompt=prompt, max_tokens=20), headers={"X-Request-Id": name})
        assert a.status_code == 200
    line = fields(wait_line(s, "id=second"))
    assert line["finish"] == "length" and line["preemptions"] == "0"
    assert int(line["cached_tokens"]) == 48 and line["prompt_tokens"] == str(len(prompt))
    # 19 steps of 2 ms; the time of the first token may be late, but not that of the last.
    assert float(line["decode_ms"]) >= 17 * 2 and float(line["prefill_ms"]) > 0
    assert float(line["ms"]) >= float(line["prefill_ms"]) + float(line["decode_ms"])
    assert float(line["ttft_ms"]) > 0


def test_line_names_the_key(start):
    s = start("--api-key", "secret-one")
    for name, key in (("good", "secret-one"), ("bad", "secret-two")):
        s.ask("GET", "/version", headers={"X-Request-Id": name, "Authorization": "Bearer " + key})
    assert fields(wait_line(s, "id=good"))["key"] == "key-1"
    assert "key" not in fields(wait_line(s, "id=bad")) and "secret" not in s.log


def test_preempted_requests_say_so(start):
    """Two requests in a pool with space for one and a half."""
    s = start("--kv-blocks", "12", "--no-prefix-cache", model="null:1000")
    body = dict(prompt=["x" * 20, "y" * 20], max_tokens=100, ignore_eos=True)
    assert s.ask("POST", "/v1/completions", json=body, headers={"X-Request-Id": "both"}).status_code == 200
    assert int(fields(wait_line(s, "id=both"))["preemptions"]) >= 1


def test_access_log(start):
    for which, good, bad in (("errors", False, True), ("none", False, False)):
        s = start("--access-log", which)
        s.ask("POST", "/v1/completions", json=dict(prompt="x"), headers={"X-Request-Id": "good"})
        s.ask("POST", "/v1/completions", json=dict(prompt=1), headers={"X-Request-Id": "bad"})
        assert s.stop() == 0
        assert ("id=good" in s.log, "id=bad" in s.log) == (good, bad)


# ---- traces ----

def test_traceparent(server):
    given = f"00-{TRACE}-{PARENT}-01"
    for stream in (False, True):
        a = server.ask("POST", "/v1/completions", json=dict(prompt="x", max_tokens=2, stream=stream), headers={"traceparent": given})
        version, trace, span, flags = a.headers["traceparent"].split("-")
        assert (version, trace, flags) == ("00", TRACE, "01") and re.fullmatch("[0-9a-f]{16}", span) and span != PARENT
        assert "completion_tokens=2" in wait_line(server, f"trace_id={TRACE} span_id={span} parent_id={PARENT}")
    for bad in ("", "nonsense", f"00-{'0' * 32}-{PARENT}-01", given.upper(), given + "-x", "00-\u00e9"):
        a = server.ask("GET", "/version", headers={"traceparent": bad.encode("latin-1")})
        assert a.status_code == 200 and "traceparent" not in a.headers
    assert "traceparent" not in server.ask("GET", "/version").headers


# ---- signals ----

def test_state_on_sigusr1(start):
    s = start("--kv-blocks", "2000", "--max-num-seqs", "2", model="null:10000")
    s.process.send_signal(signal.SIGUSR1)
    assert fields(wait_line(s, '"state queues"'))["running"] == "0"
    with s.connect() as c:
        c.sendall(post("/v1/completions", dict(prompt=["a" * 20, "b"], n=2, temperature=1, max_tokens=3000, ignore_eos=True)))
        deadline = time.monotonic() + PATIENCE_S
        while s.metric("generation_tokens_total") < 8:  # the prompt's last block has been copied
            assert time.monotonic() < deadline
        s.process.send_signal(signal.SIGUSR1)
        running = fields(wait_line(s, '"state request"', "state=running"))
        assert running["width"] == running["live"] == "2" and running["prompt_tokens"] == "20"
        assert fields(wait_line(s, '"state request"', "state=waiting"))["prompt_tokens"] == "1"
        pool = [fields(x) for x in s.log.splitlines() if '"state pool"' in x][-1]
        assert pool["blocks"] == "2000" and pool["shared"] == "1" and int(pool["used"]) + int(pool["free"]) + int(pool["cached"]) == 2000
        assert fields(wait_line(s, '"state engine"', "requests=2"))["health"] == "ready"
        assert wait_line(s, '"state server"', "streams=1")


def test_state_while_a_step_hangs(start):
    s = start(model="null:60000000")
    with s.connect() as c:
        c.sendall(post("/v1/completions", dict(prompt="x", max_tokens=9)))
        s.wait_metric("num_requests_running", 1)
        deadline = time.monotonic() + PATIENCE_S
        while '"state queues" unknown=' not in s.log:
            assert time.monotonic() < deadline
            s.process.send_signal(signal.SIGUSR1)
            time.sleep(0.1)
        assert s.ask("GET", "/health").status_code == 200


@pytest.mark.parametrize("sig", [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT])
def test_crash_leaves_a_backtrace(start, sig):
    with open(QUIRE, "rb") as f:
        if re.search(rb"__(asan|tsan)_init", f.read()):
            pytest.skip("a sanitizer reports crashes in its own way")
    s = start()
    s.process.send_signal(sig)
    assert s.process.wait(PATIENCE_S) == -sig
    assert f"crashed: {sig.name} in thread" in s.log and re.search(r"\(\+0x[0-9a-f]+\)", s.log)


# ---- metrics ----

LABELS = {"position", "model_name", "le", "mode", "finished_reason", "route", "status", "block_size", "num_gpu_blocks", "num_cpu_blocks",
          "key", "reason", "rank", "source", "cache_dtype", "bytes_per_token"}


@pytest.mark.parametrize("prefix", ["quire_", "vllm:"])
def test_every_metric_is_well_formed(start, prefix):
    s = start("--metrics-prefix", prefix)
    for body in (dict(prompt=["abc", "d" * 40], max_tokens=30, n=2), dict(prompt=1)):
        s.ask("POST", "/v1/completions", json=body)
    families = list(text_string_to_metric_families(s.get("/metrics")))
    assert len({f.name for f in families}) == len(families) > 25
    for f in families:
        assert f.documentation.endswith(".") and f.type in ("gauge", "counter", "histogram"), f.name
        assert f.name.startswith(prefix) and f.samples and all(set(x.labels) <= LABELS for x in f.samples), f
        if f.type == "counter":
            assert all(x.name == f.name + "_total" and x.value >= 0 for x in f.samples)
        if f.type == "histogram":
            part = {kind: [x for x in f.samples if x.name == f.name + kind] for kind in ("_bucket", "_sum", "_count")}
            bounds, counts = zip(*((float(x.labels["le"]), x.value) for x in part["_bucket"]))
            assert list(bounds) == sorted(set(bounds)) and bounds[-1] == float("inf"), f.name
            assert list(counts) == sorted(counts) and counts[-1] == part["_count"][0].value, f.name
            assert len(part["_sum"]) == len(part["_count"]) == 1 and part["_sum"][0].value >= 0


# ---- the dashboard ----

def names_used(dashboard):
    """The metrics that a dashboard's queries name."""
    queries = [t["expr"] for p in dashboard["panels"] for t in p.get("targets", [])]
    return {name for q in queries for name in re.findall(r"\$\{prefix\}(\w+)", q)}


@pytest.mark.parametrize("prefix", ["quire_", "vllm:"])
def test_dashboard_names_only_what_is_there(start, prefix):
    with open(os.path.join(ROOT, "deploy", "grafana", "quire.json")) as f:
        dashboard = json.load(f)
    assert prefix in dashboard["templating"]["list"][0]["query"]
    s = start("--metrics-prefix", prefix)
    s.ask("POST", "/v1/completions", json=dict(prompt="abc"))
    families = list(text_string_to_metric_families(s.get("/metrics")))
    known = {x.name for f in families for x in f.samples}
    used = names_used(dashboard)
    assert len(used) > 20 and {prefix + name for name in used} <= known
    ids = [p["id"] for p in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
