"""/metrics as Prometheus reads it, with both prefixes."""
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from conftest import PATIENCE_S

GAUGES = ["num_requests_running", "num_requests_waiting", "num_requests_swapped", "kv_cache_usage_perc", "cpu_cache_usage_perc",
          "cache_config_info", "rank_up"]
COUNTERS = ["prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens_by_source",
            "request_success", "http_requests", "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
            "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos", "late_masks",
            "moe_expert_tokens", "moe_expert_peak_tokens"]
HISTOGRAMS = ["time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
              "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
              "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens", "request_params_n",
              "iteration_tokens_total", "step_host_seconds", "step_device_seconds", "step_masks_seconds"]


@pytest.mark.parametrize("prefix", ["quire_", "vllm:"])
def test_all_of_them(start, prefix):
    s = start("--metrics-prefix", prefix, "--served-model-name", 'a "model"')
    assert s.ask("POST", "/v1/completions", json=dict(prompt="abc", max_tokens=5, n=2)).status_code == 200
    # A request is counted after its response was sent, which the client may see earlier.
    deadline = time.monotonic() + PATIENCE_S
    while 'route="/v1/completions",status="200"} 1' not in (text := s.get("/metrics")):
        assert time.monotonic() < deadline, text
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert all(name.startswith(prefix) for name in families)
    for kind, names in (("gauge", GAUGES), ("counter", COUNTERS), ("histogram", HISTOGRAMS)):
        for name in names:
            assert families[prefix + name].type == kind, name
    value = {(x.name[len(prefix):], x.labels.get("finished_reason"), x.labels.get("route"), x.labels.get("le")): x.value
             for f in families.values() for x in f.samples}
    assert value["prompt_tokens_total", None, None, None] == 3
    assert value["generation_tokens_total", None, None, None] == 10
    assert value["request_success_total", "length", None, None] >= 1
    assert value["http_requests_total", None, "/v1/completions", None] == 1
    assert value["request_params_n_bucket", None, None, "+Inf"] == value["request_params_n_count", None, None, None] == 1
    for f in families.values():
        if f.type == "histogram":
            counts = [x.value for x in f.samples if x.name.endswith("_bucket")]
            assert counts == sorted(counts)
    assert all(x.labels.get("model_name", 'a "model"') == 'a "model"' for f in families.values() for x in f.samples)


def test_prompt_tokens_by_source(start):
    """Computed and cached tokens together are the prompts' tokens."""
    s = start()
    for _ in range(2):
        assert s.ask("POST", "/v1/completions", json=dict(prompt="x" * 100, max_tokens=1)).status_code == 200
    s.wait_metric("prompt_tokens_total", 200)
    hits = s.metric("prefix_cache_hits_total")
    assert hits > 0 and s.metric("prompt_tokens_by_source_total", source="local_cache_hit") == hits
    assert s.metric("prompt_tokens_by_source_total", source="local_compute") == 200 - hits
