"""Speculative decoding: more tokens a step, and not one of them different."""
import concurrent.futures
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import time

import pytest

from conftest import PATIENCE_S, QUIRE, ROOT, clean_environment, serving

DEMO = f"{ROOT}/models/demo"
# Drafts that would not pay on this machine are verified, too.
UNKNOWN_COSTS = {"QUIRE_STEP_COSTS": "unknown"}
COMMON = ("--device", "cpu", "--threads", "1", "--max-num-seqs", "16", "--block-size", "4", "--access-log", "all")
SUBJECTS = ["Tom", "Lily", "a little dog", "the old cat", "Max"]
STORY = "Once upon a time there was a red ball. {0} saw the red ball. {0} wanted the red ball. "
WAYS = [
    dict(temperature=0),
    dict(temperature=0.8),
    dict(temperature=1, top_p=0.9, frequency_penalty=0.4, repetition_penalty=1.1),
    dict(temperature=0, min_tokens=20, stop=[" ball", " the"]),
    dict(temperature=0.7, n=3),
    dict(temperature=0, logprobs=2),
    dict(temperature=0.9, bad_words=[" red ball"]),
    dict(temperature=0, allowed_token_ids=[300, 301, 302, 303]),
    dict(temperature=1, structured_outputs={"regex": "( [a-z]{1,6}){12}\\."}),
    dict(n=2, best_of=2, use_beam_search=True, temperature=0),
]
BODIES = [
    dict(prompt=STORY.format(SUBJECTS[i % 5]) * (1 + i % 3), max_tokens=24 + i % 30, seed=i, **WAYS[i % len(WAYS)])
    for i in range(500)
]


def ask(server, body):
    answer = server.ask("POST", "/v1/completions", json=body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    return [(c["token_ids"], c["text"], c["finish_reason"], json.dumps(c.get("logprobs")))
            for c in answer.json()["choices"]]


def answers(server, bodies, at_once):
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(functools.partial(ask, server), bodies))


@pytest.fixture(scope="module")
def plain():
    """What the requests give without drafts."""
    with serving(*COMMON, model=DEMO) as server:
        yield answers(server, BODIES, 8)


@pytest.mark.parametrize("n, flags", [
    (len(BODIES), ("--speculate", "suffix", "--max-draft", "8")),
    (100, ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}', "--kv-blocks", "180")),
    (120, ("--speculate", "draft", "--draft-model", DEMO, "--max-draft", "5")),
    (100, ("--speculate", "auto", "--draft-model", DEMO, "--max-draft", "4", "--kv-blocks", "180")),
], ids=["suffix", "few blocks", "draft model", "few blocks and a draft model"])
def test_texts_are_those_without_drafts(plain, n, flags):
    with serving(*COMMON, *flags, model=DEMO, env=UNKNOWN_COSTS) as server:
        got = answers(server, BODIES[:n], 8)
        different = [i for i in range(n) if got[i] != plain[i]]
        assert different == [], [BODIES[different[0]], got[different[0]], plain[different[0]]]
        drafted = server.metric("spec_decode_num_draft_tokens_total")
        accepted = server.metric("spec_decode_num_accepted_tokens_total")
        assert drafted > accepted > 0
        assert server.metric("spec_decode_num_drafts_total") > 0
        assert server.metric("spec_decode_num_accepted_tokens_per_pos_total", position="0") > 0


def test_drafts_are_in_the_log():
    with serving(*COMMON, "--speculate", "suffix", model=DEMO, env=UNKNOWN_COSTS) as server:
        body = dict(prompt="one two three four " * 8, max_tokens=60, temperature=0)
        ask(server, body)
        end = time.monotonic() + PATIENCE_S
        while "draft_tokens=" not in server.log and time.monotonic() < end:
            time.sleep(0.01)  # the line is written behind the answer
        line = [x for x in server.log.split("\n") if "draft_tokens=" in x][-1]
        drafted, accepted = (int(re.search(rf"\b{key}=(\d+)", line).group(1)) for key in ("draft_tokens", "accepted_tokens"))
        assert drafted >= accepted > 0


def test_recent_answers_are_drafted():
    """The same question again: nearly all of its answer is drafted from the first."""
    with serving(*COMMON, "--speculate", "suffix", "--max-draft", "16", model=DEMO, env=UNKNOWN_COSTS) as server:
        body = dict(prompt="A tall tree grew", max_tokens=100, temperature=0.8, seed=5)
        first = ask(server, body)
        before = server.metric("spec_decode_num_accepted_tokens_total")
        assert ask(server, body) == first
        assert server.metric("spec_decode_num_accepted_tokens_total") - before > 50
        between = server.metric("spec_decode_num_accepted_tokens_total")
        assert ask(server, body | {"cache_salt": "another"}) == first
        assert server.metric("spec_decode_num_accepted_tokens_total") - between < 40


@pytest.fixture(scope="module")
def worse(tmp_path_factory):
    """The model with another rotation."""
    folder = tmp_path_factory.mktemp("worse")
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = 100
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_worse_draft_model_changes_no_text(plain, worse):
    with serving(*COMMON, "--speculate", "draft", "--draft-model", worse, "--max-draft", "3", model=DEMO, env=UNKNOWN_COSTS) as server:
        assert answers(server, BODIES[:60], 8) == plain[:60]
        drafted = server.metric("spec_decode_num_draft_tokens_total")
        assert 0 < server.metric("spec_decode_num_accepted_tokens_total") < drafted


@pytest.mark.parametrize("way", [dict(temperature=0), dict(temperature=0.9, top_p=0.95), dict(temperature=0.8, frequency_penalty=0.3),
                                 dict(temperature=0.7, n=3)], ids=["greedy", "sampled", "penalised", "three"])
def test_a_draft_model_that_is_the_model_drafts_every_token(way):
    """Both draw from the same noise, so what is sampled is drafted, too."""
    with serving(*COMMON, "--speculate", "draft", "--draft-model", DEMO, "--max-draft", "4", model=DEMO, env=UNKNOWN_COSTS) as server:
        ask(server, dict(prompt=STORY.format("Tom"), max_tokens=61, seed=3, ignore_eos=True, **way))
        drafted = server.metric("spec_decode_num_draft_tokens_total")
        assert drafted >= 44 * way.get("n", 1)  # of 48: the first steps may be planned ahead
        assert server.metric("spec_decode_num_accepted_tokens_total") == drafted


def test_a_draft_model_of_other_tokens_is_refused(worse):
    path = pathlib.Path(worse, "tokenizer.json")
    right = path.read_text()
    vocabulary = json.loads(right)
    ids = vocabulary["model"]["vocab"]
    last, before = sorted(ids, key=ids.get)[-1:-3:-1]
    ids[last], ids[before] = ids[before], ids[last]
    path.write_text(json.dumps(vocabulary))
    refused(("--draft-model", worse, "--speculate", "draft"), "draft_model: its vocabulary is another: token ")
    path.write_text(right)


def refused(flags, reason):
    done = subprocess.run([QUIRE, "serve", "--port", "0", "--model", DEMO, *COMMON, *flags],
                          capture_output=True, text=True, timeout=PATIENCE_S, env=clean_environment())
    assert done.returncode != 0
    assert reason in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("flags, reason", [
    (("--draft-model", f"{ROOT}/tests/golden/llama-mha24", "--speculate", "draft"), "draft_model: it was made for 128 positions"),
    (("--draft-model", DEMO, "--speculate", "suffix"), "speculate is neither draft nor auto"),
    (("--draft-model", f"{ROOT}/tests/golden/qwen35", "--speculate", "draft"), "draft_model: it has recurrent states"),
    (("--draft-model", "/nowhere", "--speculate", "draft"), "/nowhere"),
], ids=["context", "unused", "states", "absent"])
def test_a_draft_model_that_does_not_fit_is_refused(flags, reason):
    refused(flags, reason)


def test_a_stream_tells_which_tokens_were_drafts():
    with serving(*COMMON, "--speculate", "draft", "--draft-model", DEMO, "--max-draft", "3", model=DEMO, env=UNKNOWN_COSTS) as server:
        body = dict(max_tokens=33, temperature=0, ignore_eos=True, stream=True, return_token_ids=True)
        answer = server.ask("POST", "/v1/completions", json=body | {"prompt": STORY.format("Tom")})
        tokens = drafted = 0
        for line in answer.text.splitlines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                ids, places = choice.get("token_ids") or [], choice.get("drafted", [])
                assert "drafted" not in choice or (places and places == sorted(set(places)) and 0 <= places[0] and places[-1] < len(ids))
                tokens += len(ids)
                drafted += len(places)
        assert tokens == 33
        assert drafted == server.metric("spec_decode_num_accepted_tokens_total") > 20
        whole = server.ask("POST", "/v1/completions", json=body | {"prompt": STORY.format("Lily"), "stream": False}).json()
        assert "drafted" not in whole["choices"][0]


FAMILIES = sorted(d for d in os.listdir(f"{ROOT}/tests/golden") if os.path.exists(f"{ROOT}/tests/golden/{d}/config.json"))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_model_said_holds_as_a_draft(family, tmp_path):
    """Every family computes the same bits for a token alone and behind drafts: its own answer,
    drafted to it, is accepted to the last token."""
    figures = tmp_path / "figures.json"
    command = [QUIRE, "bench", "offline", "--device", "cpu", "--threads", "1", "--load-format", "dummy",
               "--model", f"{ROOT}/tests/golden/{family}", "--kv-blocks", "200", "--speculate", "suffix", "--max-draft", "4",
               "--acceptance", "1", "--requests", "2", "--input-len", "9", "--output-len", "30", "--temperature", "0.8",
               "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=clean_environment() | UNKNOWN_COSTS)
    assert done.returncode == 0, done.stderr
    figure = json.loads(figures.read_text())
    assert figure["drafts"] > 0
    assert round(figure["drafts"] * figure["accepted_per_draft"]) == figure["draft_tokens"]
