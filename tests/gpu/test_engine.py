"""The whole engine on a GPU, compared with the CPU and with itself running one request at a time."""
import concurrent.futures
import json
import urllib.request

import pytest

from alike import assert_alike

PROMPTS = ["The little dog", "Once upon a time there was", "A girl named Mia found a", "It was raining and", "\"Help!\" said",
           "In the forest, the old owl", "Tom and his sister went to the", "One day"]
POOL = ("--kv-cache-memory", "64MiB", "--max-num-seqs", "64")
EXACT = ("--deterministic", "true", *POOL)


def ask(server, prompt, **fields):
    body = {"prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True, "logprobs": 3, **fields}
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def outcome(answer):
    """The parts of an answer that must be equal bit for bit: texts, tokens and their log-probabilities."""
    return [(c["text"], c["finish_reason"], c["logprobs"] and c["logprobs"]["tokens"],
             c["logprobs"] and c["logprobs"]["token_logprobs"]) for c in answer["choices"]]


def ask_all(server, jobs):
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(lambda job: outcome(ask(server, job[0], **job[1])), jobs))


def test_greedy_as_on_the_cpu(serve):
    gpu, cpu = serve(*POOL), serve(device="cpu")
    same = [assert_alike(ask(gpu, p), ask(cpu, p)) for p in PROMPTS]
    assert sum(same) > 0.7 * 48 * len(PROMPTS), same


def test_draws_as_on_the_cpu(serve):
    fields = dict(n=8, temperature=0.8, top_p=1, seed=5, max_tokens=24, return_token_ids=True)
    a, b = (ask(s, PROMPTS[1], **fields) for s in (serve(*POOL), serve(device="cpu")))
    same = assert_alike(a, b, temperature=0.8, seed=5)
    assert same > 0.5 * 8 * 24, same


def test_long_prompt_as_on_the_cpu(serve):
    gpu, cpu = serve(*POOL), serve(device="cpu")
    prompt = " ".join(PROMPTS * 4)
    assert_alike(ask(gpu, prompt, max_tokens=24), ask(cpu, prompt, max_tokens=24))


def test_prompt_logprobs_as_on_the_cpu(serve):
    a, b = (ask(s, PROMPTS[1] + " a dog", echo=True, max_tokens=1) for s in (serve(*POOL), serve(device="cpu")))
    x, y = (r["choices"][0]["logprobs"]["token_logprobs"] for r in (a, b))
    assert len(x) == len(y) and x[0] is None
    assert max(abs(p - q) for p, q in zip(x[1:], y[1:])) < 0.15


def test_samples_share_their_prompt(serve):
    answer = ask(serve(*POOL), PROMPTS[0], n=4, temperature=0.9, seed=5)
    texts = [c["text"] for c in answer["choices"]]
    assert len(texts) == 4 and len(set(texts)) == 4
    again = ask(serve(*POOL), PROMPTS[0], n=4, temperature=0.9, seed=5)
    first = [c["logprobs"]["tokens"][:4] for c in answer["choices"]]
    assert first == [c["logprobs"]["tokens"][:4] for c in again["choices"]]


def test_beams_as_on_the_cpu(serve):
    fields = dict(n=4, use_beam_search=True, max_tokens=16, logprobs=None)
    a, b = (ask(s, PROMPTS[1], **fields) for s in (serve(*POOL), serve(device="cpu")))
    x, y = ([c["text"] for c in r["choices"]] for r in (a, b))
    assert len(set(x)) == 4 and len(set(x) & set(y)) >= 3, (x, y)


def test_stream_is_the_same_text(serve):
    server = serve(*EXACT)
    body = {"prompt": PROMPTS[2], "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]" and len(events) > 20
    text = "".join(c["text"] for e in events[:-1] for c in json.loads(e)["choices"])
    assert text == ask(server, PROMPTS[2], max_tokens=40)["choices"][0]["text"]


MIX = [(p, {"max_tokens": 40 + 9 * i}) for i, p in enumerate(PROMPTS)] + [
    (" ".join(PROMPTS[:3 + i]), {"max_tokens": 60, "temperature": 0.8, "top_p": 0.9, "seed": i, "n": 1 + i}) for i in range(4)] + [
    (PROMPTS[5], {"n": 4, "use_beam_search": True, "max_tokens": 30, "logprobs": None}),
    (PROMPTS[3], {"presence_penalty": 0.5, "repetition_penalty": 1.1, "max_tokens": 70})]


@pytest.fixture(scope="module")
def alone(serve):
    """The outcome of every request of the mix run alone."""
    server = serve(*EXACT, "--prefix-cache", "false")
    return [outcome(ask(server, prompt, **fields)) for prompt, fields in MIX]


def test_deterministic_in_any_company(serve, alone):
    server = serve(*EXACT, "--prefix-cache", "false")
    assert ask_all(server, MIX) == alone
    assert ask_all(server, MIX * 2) == alone * 2


def test_deterministic_in_small_chunks(serve, alone):
    assert ask_all(serve(*EXACT, "--max-num-batched-tokens", "64"), MIX) == alone


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_deterministic_under_preemption(serve, alone, mode):
    server = serve("--deterministic", "true", "--kv-blocks", "40", "--max-num-seqs", "64", "--preemption", mode)
    assert ask_all(server, MIX * 2) == alone * 2
    assert server.metric("num_preemptions_total", mode=mode) > 0
