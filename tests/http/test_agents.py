"""Conversations as coding agents hold them, by /v1/messages and /v1/responses: what they call, and what of each turn is
computed again."""
import importlib.util
import os

import pytest

from conftest import ROOT, serving

spec = importlib.util.spec_from_file_location("agent_trace", os.path.join(ROOT, "tests", "bench", "agent_trace.py"))
agent_trace = importlib.util.module_from_spec(spec)
spec.loader.exec_module(agent_trace)


@pytest.fixture(scope="module")
def agent_server(tmp_path_factory):
    model = agent_trace.demo_with_template(tmp_path_factory.mktemp("agents"), length=4096)
    with serving("--served-model-name", "demo", "--kv-cache-memory", "64MiB", "--device", "cpu", model=model) as s:
        yield s


@pytest.mark.parametrize("api", ["messages", "responses"])
def test_turns_compute_little_again(agent_server, api):
    """The bar is 3 % of all prompt tokens. Attribution headers change, system messages come late, and the model's own
    answers are part of the history."""
    rows = agent_trace.run(agent_server, api, "demo", turns=33, first=500, last=3600)
    prompts = [row[0] for row in rows]
    assert prompts == sorted(prompts) and prompts[-1] > 3000
    assert agent_trace.share_computed_again(rows) <= 0.03, rows


def test_tools_are_rendered_in_the_order_sent(agent_server):
    count = lambda trace: agent_server.ask("POST", "/v1/messages/count_tokens", json=trace.body()).json()["input_tokens"]
    trace = agent_trace.Trace("messages", "demo")
    n = count(trace)
    cold = agent_server.ask("POST", "/v1/messages", json=trace.body(cache_salt="order")).json()["usage"]
    warm = agent_server.ask("POST", "/v1/messages", json=trace.body(cache_salt="order")).json()["usage"]
    assert cold["input_tokens"] == n and warm["cache_read_input_tokens"] == (n - 1) // 16 * 16
    trace.tools.reverse()
    other = agent_server.ask("POST", "/v1/messages", json=trace.body(cache_salt="order")).json()["usage"]
    assert other["cache_read_input_tokens"] < warm["cache_read_input_tokens"]
