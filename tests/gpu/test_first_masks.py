"""A server whose first request is constrained. The device waits for masks behind the logits, and no kernel can be loaded meanwhile: what
stands behind that wait in a step must have run in front of it. QUIRE_STEP_COSTS: no step is measured at start, so none has run yet."""
import os
import re

import httpx
import pytest

from conftest import DEVICE, ROOT, Server

import head_models

PATIENCE_S = 60


@pytest.fixture(params=["demo", "qwen3-next"])
def server(request, tmp_path):
    model = os.path.join(ROOT, "models", "demo")
    flags = []
    if request.param != "demo":  # experts, whose load is counted at a step's end
        model, flags = str(tmp_path / "model"), ["--load-format", "dummy"]
        head_models.write_mixed(model, request.param)
    s = Server("--device", DEVICE, *flags, model=model, env={"QUIRE_STEP_COSTS": "unknown"})
    yield s
    if s.process.poll() is None:
        assert s.stop() == 0, s.log


@pytest.mark.parametrize("more", [{}, {"prompt": [7, 11, 13, 17] * 100, "echo": True, "logprobs": 1}], ids=["short", "chunks of logits"])
def test_first_request_is_constrained(server, more):
    body = {"prompt": "A", "max_tokens": 4, "guided_regex": "[0-9]{2}", "temperature": 0} | more
    try:
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=PATIENCE_S)
    except httpx.ReadTimeout:
        server.process.kill()
        raise
    assert answer.status_code == 200, answer.text
    text = answer.json()["choices"][0]["text"]
    assert re.search(r"[0-9]{2}\Z", text), text[-20:]
