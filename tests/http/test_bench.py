"""`quire bench` against a real server and in its own process: the figures must match the options."""
import json
import subprocess

import pytest

from conftest import PACED, QUIRE


def bench(*args, ok=True):
    run = subprocess.run([QUIRE, "bench", *args, "--json", "-"], capture_output=True, text=True, timeout=600)
    assert (run.returncode == 0) == ok, run.stdout + run.stderr
    return json.loads(run.stdout.splitlines()[-1]) if ok else run.stderr


def test_a_closed_loop_counts_every_token(delayed):
    r = bench("serve", "--url", delayed.url, "--requests", "24", "--concurrency", "8", "--input-len", "20", "--output-len", "30")
    assert (r["requests"], r["failed"], r["concurrency"]) == (24, 0, 8)
    assert (r["prompt_tokens"], r["output_tokens"]) == (24 * 20, 24 * 30)
    assert r["merged_share"] == 0
    assert r["itl_ms"]["p50"] <= r["itl_ms"]["p99"] <= r["itl_ms"]["max"]
    # Thirty steps of ten milliseconds; the parts make up the whole.
    assert r["ttft_ms"]["p50"] > 9 and r["e2e_ms"]["p50"] > 29 * 9.5
    assert r["ttft_ms"]["mean"] + 29 * r["itl_ms"]["mean"] == pytest.approx(r["e2e_ms"]["mean"], rel=0.02)
    assert r["normalized_ms"]["mean"] == pytest.approx(r["e2e_ms"]["mean"] / 30, rel=0.02)


def test_poisson_arrivals_and_several_samples(delayed):
    r = bench("serve", "--url", delayed.url + "/", "--requests", "40", "--request-rate", "200", "--input-len", "5",
              "--output-len", "4", "--n", "3", "--temperature", "1")
    assert (r["failed"], r["output_tokens"]) == (0, 40 * 4 * 3)
    assert r["wall_s"] > 0.05


def test_what_fails_is_said(delayed):
    assert "HTTP 400" in bench("serve", "--url", delayed.url, "--requests", "2", "--output-len", "999999", ok=False)
    assert "refused" in bench("serve", "--url", "http://127.0.0.1:9", "--requests", "2", ok=False)
    assert "no flag" in bench("serve", "--kv-blocks", "9", ok=False)


def test_offline_measures_the_steady_batch():
    r = bench("offline", "null:20000", "--requests", "8", "--input-len", "16", "--output-len", "40")
    assert (r["requests"], r["prompt_tokens"], r["output_tokens"]) == (8, 8 * 16, 8 * 40)
    assert 2 < r["decode_step_ms"] < 2000  # twenty; the machine may read the clock late
    assert 10 <= r["decode_steps"] <= 40 - 8 - 2 + 1  # fewer if the output thread got several at once
    assert r["step_host_us"] < r["decode_step_ms"] * 1000
    assert 0 < r["decode_step_host_us"] < r["decode_step_ms"] * 1000


def test_offline_runs_free_and_under_schemas(tmp_path):
    schemas = tmp_path / "schemas.jsonl"
    items = [{"type": "integer"}, {"enum": ["left", "right"]}, {"const": "the same each time"}]
    schemas.write_text("\n".join(json.dumps({"type": "array", "items": i, "minItems": 99}) for i in items) + "\n\n")
    args = ["offline", "--requests", "6", "--input-len", "4", "--output-len", "40", "--temperature", "1"]
    r = bench(*args, "--schemas", str(schemas), "--speculate", "grammar")
    assert r["schemas"] == 3 and r["output_tokens"] == 6 * 40
    assert r["constrained_to_free"] > 0 and r["forced_tokens"] >= 0
    schemas.write_text('{"type": "integer"}\n{"type": "none"}\n')
    assert "schema 2" in bench(*args, "--schemas", str(schemas), ok=False)


def test_offline_takes_a_workload_and_settings(tmp_path):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("# prompt output\n10 5\n30 7\n")
    r = bench("offline", "null", "--workload", str(lengths), "--kv-blocks", "64", "--max-num-seqs", "1")
    assert (r["requests"], r["prompt_tokens"], r["output_tokens"]) == (2, 40, 12)
