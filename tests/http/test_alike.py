"""The comparison of near ties (alike.py): it knows the sampling noise, and accepts only real ties."""
import os

import pytest

from alike import assert_alike, assert_beams_alike, noise
from conftest import ROOT, serving


def test_each_draw_is_the_greatest_with_its_noise():
    """The first tokens of the samples of one prompt: with the noise of its own, each sample's token is
    the greatest."""
    fields = dict(prompt="Once upon a time there was a", n=24, best_of=24, max_tokens=1, seed=11,
                  temperature=1.3, top_p=1, logprobs=0, return_token_ids=True)
    with serving("--device", "cpu", model=os.path.join(ROOT, "models", "demo")) as server:
        answer = server.ask("POST", "/v1/completions", json=fields).json()
    drawn = [(c["token_ids"][0], c["logprobs"]["token_logprobs"][0]) for c in answer["choices"]]
    assert len(set(drawn)) > 5
    position = answer["usage"]["prompt_tokens"]
    for index, own in enumerate(drawn):
        def score(token):
            return token[1] / 1.3 + noise(11, index, position, token[0])
        assert score(own) >= max(map(score, drawn)) - 1e-4


def answer(*choices):
    return {"usage": {"prompt_tokens": 3}, "choices": [
        {"index": i, "text": "", "finish_reason": "length", "token_ids": ids,
         "logprobs": {"tokens": [str(t) for t in ids], "token_logprobs": told}}
        for i, (ids, told) in enumerate(choices)]}


def test_what_is_a_tie():
    one = answer(([5, 6, 7], [-1.0, -2.0, -0.5]), ([5, 8], [-1.0, -3.0]))
    assert assert_alike(one, one) == 5
    assert assert_alike(one, answer(([5, 9, 1], [-1.05, -2.05, -9.0]), ([5, 8], [-1.0, -3.0]))) == 3
    for bad in (([5, 9, 7], [-1.0, -2.2, -0.5]),  # no tie
                ([5, 6, 7], [-1.0, -2.2, -0.5]),  # the same token, and not as likely
                ([5, 6], [-1.0, -2.0])):  # ended early
        with pytest.raises(AssertionError):
            assert_alike(one, answer(bad, ([5, 8], [-1.0, -3.0])))


def test_a_draw_is_judged_with_its_noise():
    apart = 0.8 * (noise(4, 0, 3, 6) - noise(4, 0, 3, 9))
    one, other = answer(([6], [-2.0])), answer(([9], [-2.0 + apart]))
    assert abs(apart) > 0.1
    assert assert_alike(one, other, temperature=0.8, seed=4) == 0
    for kind in (dict(), dict(temperature=0.8, seed=5)):
        with pytest.raises(AssertionError):
            assert_alike(one, other, **kind)


def test_beams_of_like_probability_are_alike():
    one = answer(([5, 6], [-1.0, -2.0]), ([5, 8], [-1.0, -2.5]))
    assert_beams_alike(one, answer(([5, 7], [-1.0, -2.05]), ([5, 8], [-1.0, -2.5])))
    with pytest.raises(AssertionError):
        assert_beams_alike(one, answer(([5, 7], [-1.0, -1.5]), ([5, 8], [-1.0, -2.5])))
