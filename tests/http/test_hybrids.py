"""Models with recurrent states: however a text comes about, its ids are the same."""
import functools
import json
import random
import shutil

import pytest

import hybrid_model
from company import DEVICE, ON, STORY, ask_all, ask_crowd_apart, ask_each, check_company
from conftest import PATIENCE_S, ROOT, serving

COMMON = (*ON, "--threads", "1", "--block-size", "4", "--max-num-seqs", "8",
          "--max-num-batched-tokens", "48", "--state-snapshot-tokens", "16")
DEMO = f"{ROOT}/models/demo"
# Drafts that would not pay on this machine are verified, too.
UNKNOWN_COSTS = {"QUIRE_STEP_COSTS": "unknown"}
# Their states are of the same kind as Bamba's, so what depends on the kind alone leaves them out.
LIKE_BAMBA = pytest.mark.alike("folder", ["granite", "falcon", "nemotron"])


@pytest.fixture(scope="module", params=list(hybrid_model.CONFIGS))
def folder(tmp_path_factory, request):
    return hybrid_model.make(tmp_path_factory.mktemp(request.param), request.param)


def several_ranks(flags):
    if DEVICE != "cpu" and any("parallel-size" in flag for flag in flags):
        pytest.skip("takes several devices")


def small_pool(folder):
    """Blocks for hardly more than the largest request."""
    return "72" if "qwen35" in folder or "jamba" in folder else "120" if "lfm2" in folder else "44"


@functools.cache
def alone(folder, *flags):
    """Each answer, one after the other, without cached prefixes."""
    with serving(*COMMON, "--kv-blocks", "2000", "--no-prefix-cache", *flags, model=folder) as server:
        return ask_each(server)


@functools.cache
def crowd_apart(folder):
    with serving(*COMMON, "--kv-blocks", "2000", "--no-prefix-cache", model=folder) as server:
        return ask_crowd_apart(server)


@pytest.mark.parametrize("flags", [
    ("--kv-blocks", "2000"),
    ("--kv-blocks", "2000", "--max-num-batched-tokens", "9"),
    ("--kv-blocks", "few", "--preemption", "recompute"),
    ("--kv-blocks", "few", "--preemption", "swap", "--swap-space", "64MiB"),
    ("--kv-blocks", "few", "--preemption", "recompute", "--no-prefix-cache", "--policy", "fair"),
    ("--kv-blocks", "few", "--preemption", "swap", "--swap-space", "64MiB", "--pipeline-parallel-size", "2"),
], ids=["roomy", "small steps", "recompute", "swap", "no cache", "stages"])
def test_texts_do_not_depend_on_their_company(folder, flags):
    several_ranks(flags)
    want, crowd = alone(folder), crowd_apart(folder)
    flags = [small_pool(folder) if flag == "few" else flag for flag in flags]
    with serving(*COMMON, *flags, model=folder) as server:
        check_company(server, want, crowd, rounds=2, preempts=flags[1] != "2000")
        if "--no-prefix-cache" not in flags:
            assert server.metric("prefix_cache_hits_total") > 0


def test_ranks_hold_their_share_of_the_states(folder):
    several_ranks(["--tensor-parallel-size"])
    want = alone(folder, "--tensor-parallel-size", "2")
    with serving(*COMMON, "--kv-blocks", small_pool(folder), "--tensor-parallel-size", "2", model=folder) as server:
        assert ask_all(server, 2) == want * 2


@LIKE_BAMBA
def test_a_long_conversation_is_hardly_read_again(folder):
    """33 turns, each with all before it: what earlier turns had is found but for less than a snapshot."""
    again = old = 0
    text = STORY
    with serving(*COMMON, "--kv-blocks", "4000", model=folder) as server:
        before = 0
        for turn in range(33):
            text += f" Turn {turn}: " + STORY
            body = dict(prompt=text, max_tokens=8, temperature=0, ignore_eos=True)
            answer = server.ask("POST", "/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            usage, answer = answer.json()["usage"], answer.json()["choices"][0]["text"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            again += max(before - cached, 0)
            old += before
            before = usage["prompt_tokens"]
    assert old > 10000 and again <= 0.05 * old, (again, old)


# How many drafts hold, and what the states go back to then, is told by suffixes for every model; a draft model changes
# who drafts.
@pytest.mark.parametrize("flags", [
    ("--kv-blocks", "2000", "--speculate", "suffix"),
    pytest.param(("--kv-blocks", "2000", "--speculate", "draft", "--draft-model", DEMO, "--max-draft", "3", "--max-model-len", "1024"),
                 marks=LIKE_BAMBA),
    pytest.param(("--kv-blocks", "few", "--preemption", "recompute", "--speculate", "auto", "--draft-model", DEMO,
                  "--max-model-len", "400"), marks=LIKE_BAMBA),
    ("--kv-blocks", "few", "--preemption", "swap", "--swap-space", "64MiB", "--speculate", "suffix", "--max-draft", "20"),
    ("--kv-blocks", "2000", "--pipeline-parallel-size", "2", "--speculate", "suffix"),
], ids=["suffix", "draft model", "recompute", "swap", "stages"])
def test_drafts_change_no_text(folder, flags):
    """States go on from the last draft that held. The second and third time nearly all of an answer is drafted."""
    several_ranks(flags)
    want = alone(folder)
    flags = [small_pool(folder) if flag == "few" else flag for flag in flags]
    with serving(*COMMON, *flags, model=folder, env=UNKNOWN_COSTS) as server:
        assert ask_each(server) == want
        for _ in range(2):
            assert ask_all(server, 2) == want * 2
        accepted = server.metric("spec_decode_num_accepted_tokens_total")
        assert server.metric("spec_decode_num_draft_tokens_total") >= max(accepted, 1)
        assert "draft" in flags or accepted > (1000 if flags[1] == "2000" else 0)


def turns(server, n):
    """A conversation of n turns as ids, each with the answer before it: (tokens of earlier turns, those computed again)."""
    rng, text, old, again = random.Random(7), [], 0, 0
    for _ in range(n):
        before = len(text)
        text = text + [rng.randrange(3, 400) for _ in range(20)]
        body = dict(prompt=text, max_tokens=36, temperature=0, ignore_eos=True, return_token_ids=True)
        answer = server.ask("POST", "/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        text += answer.json()["choices"][0]["token_ids"]
        old, again = old + before, again + max(before - cached, 0)
    return text, old, again


@LIKE_BAMBA
def test_the_end_of_a_turn_is_found_again(folder):
    """Where snapshots of the prompt are far apart, a turn goes on from the states behind the answer before it."""
    flags = (*COMMON, "--block-size", "128", "--state-snapshot-tokens", "128", "--kv-blocks", "200")
    with serving(*flags, model=folder) as server:
        text, old, again = turns(server, 33)
    assert old > 25000 and again <= 0.01 * old, (again, old)
    with serving(*flags, "--no-prefix-cache", model=folder) as server:
        assert turns(server, 33) == (text, old, old)


@pytest.mark.parametrize("flags, words", [
    (("--state-snapshot-tokens", "18"), "state_snapshot_tokens is 18"),
    (("--kv-policy", "orca-max"), "kv_policy must be paged"),
    (("--kv-blocks", "1"), "do not hold one token"),
    (("--tensor-parallel-size", "too many"), "tensor_parallel_size"),
])
def test_what_cannot_be_is_refused_in_one_line(folder, start, flags, words):
    several_ranks(flags)
    # Four ranks divide the channels of Jamba's states, and share the groups of Falcon's, which have no norms, and Granite's one.
    four = any(kind in folder for kind in ("jamba", "falcon", "granite"))
    flags = [("8" if four else "4") if flag == "too many" else flag for flag in flags]
    server = start(*COMMON, *flags, model=folder, wait=False)
    assert server.process.wait(PATIENCE_S) == 1, server.log
    lines = [x for x in server.log.splitlines() if "cannot start" in x]
    assert len(lines) == 1 and words in lines[0], server.log


@pytest.mark.parametrize("flags, words", [
    (("--kv-blocks", "1"), "do not hold one token"),
    (("--state-snapshot-tokens", "18"), "state_snapshot_tokens is 18"),
    (("--kv-cache-memory", "100"), "no memory for the KV cache"),
    (("--kv-blocks", "8", "--max-model-len", "1000"), "max_model_len is 1000, but the KV cache holds"),
])
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_pool_that_cannot_be_is_refused_before_weights_are_read(folder, start, tmp_path, ranks, flags, words):
    several_ranks(["--tensor-parallel-size"] * int(ranks == "2"))
    bare = shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    server = start(*COMMON, *flags, "--tensor-parallel-size", ranks, model=str(bare), wait=False)
    assert server.process.wait(PATIENCE_S) == 1, server.log
    lines = [x for x in server.log.splitlines() if "cannot start" in x]
    assert len(lines) == 1 and words in lines[0], server.log


def see(server):
    """The errors of requests with an image, one of each API."""
    url, image = "data:image/png;base64,AA==", {"type": "base64", "media_type": "image/png", "data": "AA=="}
    for path, body in (
            ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}),
            ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}),
            ("messages", {"max_tokens": 4, "messages": [{"role": "user", "content": [{"type": "image", "source": image}]}]})):
        answer = server.ask("POST", f"/v1/{path}", json={"model": "m"} | body)
        assert answer.status_code == 400, answer.text
        yield answer.json()["error"]["message"]


def test_an_image_for_the_text_of_a_model_that_sees_is_refused_with_the_reason(start, tmp_path):
    seeing, plain = tmp_path / "seeing", tmp_path / "plain"
    for made in (seeing, plain):
        made.mkdir()
        hybrid_model.make(made, "qwen35")
        words = json.loads((made / "tokenizer_config.json").read_text())
        words["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
        (made / "tokenizer_config.json").write_text(json.dumps(words))
    hybrid_model.wrap(seeing, "Qwen3_5ForConditionalGeneration", "qwen35")
    flags = (*COMMON, "--kv-blocks", "200", "--served-model-name", "m")
    for folder, told in ((seeing, True), (plain, False)):
        server = start(*flags, model=str(folder))
        assert server.ask("POST", "/v1/completions", json=dict(model="m", prompt="The cat", max_tokens=2)).status_code == 200
        for message in see(server):
            assert ("the model's vision tower is skipped" in message) == told, message
            assert "image" in message
