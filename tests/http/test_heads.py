"""Draft heads: EAGLE-3 beside a model and MTP in its checkpoint draft tokens, and not one of the text's is different."""

import collections
import json
import os
import pathlib
import shutil
import signal

import pytest

import head_models
from conftest import PATIENCE_S, WHOLE, serving
from test_ranks import held_stream
from test_speculation import BODIES, COMMON, DEMO, UNKNOWN_COSTS, answers, refused

# All ways, subjects and lengths, each twice; the others differ in their seeds.
ASKED = BODIES[: 120 if WHOLE else 60]
N_IDS = 24


@pytest.fixture(scope="module")
def plain():
    with serving(*COMMON, model=DEMO) as server:
        yield answers(server, ASKED, 8)


@pytest.fixture(scope="module")
def eagle3(plain, tmp_path_factory):
    """A head of random weights that drafts the most frequent tokens alone, so that some hold."""
    return head_models.write_eagle3(tmp_path_factory.mktemp("eagle3"), frequent(plain))


def frequent(answers):
    said = collections.Counter(t for answer in answers for choice in answer for t in choice[0])
    return sorted(t for t, _ in said.most_common(N_IDS))


@pytest.fixture(scope="module")
def peagle(plain, tmp_path_factory):
    folder = tmp_path_factory.mktemp("peagle")
    return head_models.write_eagle3(folder, frequent(plain), parallel=True)


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-draft", "5"),
        ("--kv-blocks", "180", "--max-draft", "3", "--preemption", "swap"),
        ("--kv-blocks", "180", "--preemption", "recompute"),
        ("--kv-cache-dtype", "int8"),
    ],
    ids=["plain", "swapped", "recomputed", "int8 cache"],
)
def test_texts_are_those_without_a_head(plain, eagle3, flags):
    if "int8" in flags:
        with serving(*COMMON, *flags, model=DEMO) as server:
            plain = answers(server, ASKED, 8)
    with serving(
        *COMMON,
        *flags,
        "--speculate",
        "draft",
        "--draft-model",
        str(eagle3),
        model=DEMO,
        env=UNKNOWN_COSTS,
    ) as server:
        assert answers(server, ASKED, 8) == plain
        drafted = server.metric("spec_decode_num_draft_tokens_total")
        assert drafted > server.metric("spec_decode_num_accepted_tokens_total") > 0
        assert (
            answers(server, ASKED[:20], 8) == plain[:20]
        )  # prompts whose blocks, hidden states included, are there


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-draft", "5"),
        ("--kv-blocks", "180", "--max-draft", "8", "--preemption", "swap", "--speculate", "auto"),
        ("--tensor-parallel-size", "2"),
    ],
    ids=["plain", "few blocks", "ranks"],
)
def test_texts_are_those_without_a_parallel_head(plain, peagle, request, flags):
    if "--tensor-parallel-size" in flags:
        plain = request.getfixturevalue("plain_on_ranks")
    config = json.dumps({"method": "eagle3", "model": str(peagle), "parallel_drafting": True})
    named = ("--draft-model", str(peagle)) if "auto" in flags else ("--speculative-config", config)
    with serving(*COMMON, *named, *flags, model=DEMO, env=UNKNOWN_COSTS) as server:
        assert answers(server, ASKED, 8) == plain
        drafted = server.metric("spec_decode_num_draft_tokens_total")
        assert drafted > server.metric("spec_decode_num_accepted_tokens_total") > 0


@pytest.fixture(scope="module", params=head_models.MTP)
def with_mtp(tmp_path_factory, request):
    """A small model of dummy weights with the demo model's tokenizer, and its MTP head."""
    return str(head_models.write_mtp(tmp_path_factory.mktemp(request.param), request.param))


def test_texts_are_those_without_mtp(with_mtp):
    dummy = (*COMMON, "--load-format", "dummy")
    few = "1200" if "qwen" in with_mtp else "180"
    with serving(*dummy, model=with_mtp) as server:
        expected = answers(server, ASKED[:60], 8)
    for flags in [
        ("--speculate", "mtp", "--kv-blocks", few),
        ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}'),
    ]:
        with serving(*dummy, *flags, model=with_mtp, env=UNKNOWN_COSTS) as server:
            assert answers(server, ASKED[:60], 8) == expected
            assert server.metric("spec_decode_num_draft_tokens_total") > 0


def changed(eagle3, tmp_path, **members):
    folder = tmp_path / "changed"
    shutil.copytree(eagle3, folder)
    config = json.loads((folder / "config.json").read_text()) | members
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    "members, reason",
    [
        ({"hidden_size": 128}, "draft_model: the EAGLE-3 head is 128 wide"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]},
            "draft_model: the EAGLE-3 head reads layer 9; the model has 8 layers",
        ),
        ({"intermediate_size": 32}, "mlp.gate_proj.weight is [64, 256], must be [32, 256]"),
        ({"draft_vocab_size": 23}, "lm_head.weight is [24, 256], must be [23, 256]"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size must be a whole number"),
        ({"num_hidden_layers": 2}, "missing model.layers.*.input_layernorm.weight"),
        ({"ptd_token_id": 9}, "missing model.mask_hidden"),
        ({"ptd_token_id": 4096}, "draft_model: the head's mask token is 4096, the model has 4096"),
        ({"parallel_drafting": True}, "drafts in parallel and names no mask token"),
        ({"norm_before_fc": True}, "a draft head with norm_before_fc is not supported"),
    ],
    ids=[
        "width",
        "layers to read",
        "shape",
        "drafted ids",
        "type",
        "layers",
        "nothing behind the mask",
        "mask token",
        "no mask token",
        "newer",
    ],
)
def test_a_head_that_does_not_fit_is_refused(eagle3, tmp_path, members, reason):
    refused(("--speculate", "draft", "--draft-model", changed(eagle3, tmp_path, **members)), reason)


def test_ids_out_of_range_are_refused(eagle3, tmp_path):
    folder = changed(eagle3, tmp_path)
    tensors = head_models.head_tensors(256, [*range(N_IDS - 1), 4096])
    head_models.write_safetensors(pathlib.Path(folder, "model.safetensors"), tensors)
    refused(
        ("--speculate", "draft", "--draft-model", folder),
        "d2t makes id 4096 of the drafted id 23; ids must ascend below 4096",
    )


def test_a_model_without_mtp_is_refused():
    refused(("--speculate", "mtp"), "speculate: LlamaForCausalLM has no MTP head that is known")


RANKS = ("--tensor-parallel-size", "2")


@pytest.fixture(scope="module")
def plain_on_ranks():
    with serving(*COMMON, *RANKS, model=DEMO) as server:
        yield answers(server, ASKED, 8)


def drafted_on_ranks(*flags, model, n, expected):
    with serving(*COMMON, *RANKS, *flags, model=model, env=UNKNOWN_COSTS) as server:
        assert answers(server, ASKED[:n], 8) == expected[:n]
        drafted = server.metric("spec_decode_num_draft_tokens_total")
        assert drafted >= server.metric("spec_decode_num_accepted_tokens_total")
        assert drafted > 0
        assert answers(server, ASKED[:20], 8) == expected[:20]
        return server.metric("spec_decode_num_accepted_tokens_total")


@pytest.mark.parametrize(
    "flags",
    [("--max-draft", "4"), ("--kv-blocks", "180", "--preemption", "swap"), ("--deterministic",)],
    ids=["plain", "swapped", "deterministic"],
)
def test_a_head_is_divided_among_ranks(plain_on_ranks, eagle3, flags):
    head = ("--speculate", "draft", "--draft-model", str(eagle3))
    assert drafted_on_ranks(*flags, *head, model=DEMO, n=len(ASKED), expected=plain_on_ranks) > 0


def test_a_draft_model_is_divided_among_ranks(plain_on_ranks):
    own = ("--speculate", "auto", "--draft-model", DEMO, "--max-draft", "3")
    assert drafted_on_ranks(*own, model=DEMO, n=60, expected=plain_on_ranks) > 0


@pytest.mark.parametrize("parallel", [(), ("--expert-parallel",)], ids=["sliced", "by expert"])
def test_mtp_is_divided_among_ranks(with_mtp, parallel):
    dummy = ("--load-format", "dummy", "--dtype", "float32", *parallel)
    with serving(*COMMON, *RANKS, *dummy, model=with_mtp) as server:
        expected = answers(server, ASKED[:30], 8)
    drafted_on_ranks(*dummy, "--speculate", "mtp", model=with_mtp, n=30, expected=expected)


def test_a_rank_killed_while_it_drafts_ends_the_service(start, eagle3):
    head = ("--speculate", "draft", "--draft-model", str(eagle3))
    s = start(*COMMON, *RANKS, *head, "--kv-blocks", "512", model=DEMO, env=UNKNOWN_COSTS)
    reader, rank = held_stream(s)
    os.kill(rank, signal.SIGKILL)
    assert b"error" in b"".join(reader.chunks())
    assert s.process.wait(PATIENCE_S) == 1
    assert "was ended by signal 9" in s.log


def test_heads_of_a_model_in_stages_are_refused(eagle3, with_mtp):
    stages = ("--pipeline-parallel-size", "2")
    reason = "a model in stages has no draft model or head"
    refused(("--speculate", "draft", "--draft-model", str(eagle3), *stages), reason)
    refused(("--speculate", "mtp", "--model", with_mtp, *stages), reason)


def test_a_head_that_ranks_do_not_divide_is_refused(eagle3, tmp_path):
    head = changed(eagle3, tmp_path, num_attention_heads=3, num_key_value_heads=3)
    refused(
        ("--speculate", "draft", "--draft-model", head, *RANKS),
        "the draft model or head: tensor_parallel_size 2 does not divide the model: 3 heads",
    )


def test_a_head_is_no_model(eagle3):
    refused(("--model", str(eagle3)), "is a draft head; name it by draft_model, beside its model")
