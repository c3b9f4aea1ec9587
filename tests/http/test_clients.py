"""Clients that people use, against a null server; each is skipped where it is not installed.

The Python ones are heavy, so scripts/check does not install them: build/venv/bin/pip install langchain-openai litellm
"""
import json
import re
import shutil
import subprocess

import pytest

from conftest import PATIENCE_S
from raw import events


def test_langchain_completions(server):
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    llm = langchain.OpenAI(model="null", base_url=server.url + "/v1", api_key="none", max_tokens=20, seed=1, max_retries=0)
    whole = llm.invoke("hello")
    assert len(whole) == 20 and "".join(llm.stream("hello")) == whole
    assert len(llm.batch(["a", "b", "c"])) == 3
    assert len(llm.generate(["a", "b"]).generations) == 2


def test_litellm_completions(server):
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    ask = dict(model="text-completion-openai/null", prompt="hello", api_base=server.url + "/v1", api_key="none", max_tokens=20,
               seed=1, num_retries=0)
    whole = litellm.text_completion(**ask)
    assert len(whole.choices[0].text) == 20 and whole.usage.completion_tokens == 20
    parts = [p.choices[0].text or "" for p in litellm.text_completion(stream=True, **ask)]
    assert "".join(parts) == whole.choices[0].text


def test_benchmark_by_url(server):
    """What benchmark clients of other servers send to /v1/completions, and what they read of the answer."""
    body = {"model": "null", "prompt": "hello " * 20, "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 30, "logprobs": None,
            "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "best_of": 1, "n": 1}
    a = server.ask("POST", "/v1/completions", json=body, headers={"Authorization": "Bearer none"})
    payloads = events(a.content)
    assert a.status_code == 200 and "x-quire-ignored" not in a.headers and payloads[-1] == "[DONE]"
    pieces = [json.loads(p) for p in payloads[:-1]]
    assert pieces[-1]["choices"] == [] and pieces[-1]["usage"]["completion_tokens"] == 30
    assert all(p["choices"][0]["text"] for p in pieces[:-1])


@pytest.mark.parametrize("tool, arguments, failed", [
    ("ab", ["-q", "-k", "-n", "200", "-c", "8", "-T", "application/json", "-p", "BODY"], r"(?:Failed requests|Non-2xx responses):\s+[1-9]"),
    ("hey", ["-n", "200", "-c", "8", "-m", "POST", "-T", "application/json", "-D", "BODY"], r"\[[345]\d\d\]|Error distribution"),
    ("wrk", ["-d", "1s", "-c", "8", "-t", "1"], r"Non-2xx|Socket errors: connect [1-9]"),
])
def test_load_generators(server, tmp_path, tool, arguments, failed):
    if not shutil.which(tool):
        pytest.skip(f"{tool} is not installed")
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"prompt": "x", "max_tokens": 5}))
    path = "/health" if tool == "wrk" else "/v1/completions"
    done = subprocess.run([tool, *(str(body) if a == "BODY" else a for a in arguments), server.url + path], capture_output=True,
                          text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and not re.search(failed, done.stdout), done.stdout + done.stderr
