"""A real GGUF file beside the Hugging Face directory made from it (scripts/fetch-model): the same text, byte for byte.

QUIRE_TEST_GGUF names the file, QUIRE_TEST_GGUF_HF the directory.
"""
import json
import os
import urllib.request

import pytest

FILE, DIRECTORY = os.environ.get("QUIRE_TEST_GGUF", ""), os.environ.get("QUIRE_TEST_GGUF_HF", "")
FLAGS = ["--device", "cpu", "--max-model-len", "512"]
PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fib(n):\n",
    "In 1998, 12345 naïve cafés — 你好 🙂",
    "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
]

pytestmark = pytest.mark.skipif(
    not (os.path.isfile(FILE) and os.path.isdir(DIRECTORY)),
    reason="QUIRE_TEST_GGUF and QUIRE_TEST_GGUF_HF name no GGUF file and no directory made from it")


def complete(server, prompt):
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "logprobs": 2}
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def test_greedy_text_is_that_of_the_directory(start):
    gguf, directory = start(*FLAGS, model=FILE), start(*FLAGS, model=DIRECTORY)
    for prompt in PROMPTS:
        a, b = complete(gguf, prompt), complete(directory, prompt)
        assert a["usage"] == b["usage"]
        assert a["choices"][0]["text"] == b["choices"][0]["text"]
        # The weights are the same bits, so are their logits.
        assert a["choices"][0]["logprobs"]["token_logprobs"] == b["choices"][0]["logprobs"]["token_logprobs"]


def test_load_format_must_fit(start):
    for load_format, model in (("safetensors", FILE), ("gguf", DIRECTORY)):
        server = start("--load-format", load_format, model=model, wait=False)
        assert server.process.wait(20) == 1
        assert "load_format" in server.log
