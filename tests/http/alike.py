"""Compare the answers of two servers whose arithmetic differs in the last bits (tensor
parallelism, another device): they must be equal, or diverge at a token that was nearly a tie.

Both requests need logprobs. The sampled token has the greatest logit / temperature + noise,
and the noise is known (kernels/noise.h). So the margin of each sample can be computed if the
request has a seed and return_token_ids, and no top_k, top_p or min_p, since rounding may move
a token across their thresholds."""
import math

NEAR = 0.1  # difference of log-probabilities that rounding may reverse
WORD = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15


def mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


def noise(seed, index, position, token):
    """The Gumbel noise of a token, for sample `index` of a request with this seed."""
    of_sample = mix(seed + index * STEP & WORD)
    key = mix(of_sample ^ mix(position * STEP + 1 & WORD))
    bits = mix(key + (token + 1) * STEP & WORD) >> 32
    return -math.log(-math.log1p(-(bits + 0.5) / 2**32))


def logprobs_near(x, y, penalty=0.0):
    """One of the two tokens may have had the presence penalty, which the reported
    log-probabilities do not include."""
    return min(abs(x - y), abs(abs(x - y) - penalty)) < NEAR


def alike_tokens(a, b, penalty, noise_of):
    """The number of leading tokens that two choices have in common. noise_of(i, token) is the
    noise added to the log-probability of a token at position i."""
    x, y = a["logprobs"], b["logprobs"]
    key = "token_ids" if "token_ids" in a else None
    tokens = zip(a[key], b[key]) if key else zip(x["tokens"], y["tokens"])
    for i, (s, t) in enumerate(tokens):
        p, q = x["token_logprobs"][i], y["token_logprobs"][i]
        if p is None or q is None:  # the first token of an echoed prompt
            assert (s, p) == (t, q), i
            continue
        if s != t:
            p, q = p + noise_of(i, s), q + noise_of(i, t)
            told = f"token {i}: {x['tokens'][i]!r} {y['tokens'][i]!r}, {p} and {q}"
            assert logprobs_near(p, q, penalty), told
            return i
        assert abs(p - q) < NEAR, f"token {i}: {x['tokens'][i]!r}, {p} and {q}"
    assert len(x["tokens"]) == len(y["tokens"]) and a["finish_reason"] == b["finish_reason"]
    return len(x["tokens"])


def assert_alike(a, b, penalty=0.0, temperature=0.0, seed=0):
    """For answers to a greedy request, or to one with this temperature and seed. Returns the
    number of equal tokens."""
    assert len(a["choices"]) == len(b["choices"])
    same = 0
    for k, (x, y) in enumerate(zip(a["choices"], b["choices"])):
        def noise_of(i, token):
            position = a["usage"]["prompt_tokens"] + i
            return temperature * noise(seed, k, position, token) if temperature else 0.0
        assert x["index"] == y["index"] == k
        same += alike_tokens(x, y, penalty, noise_of)
    return same


def assert_beams_alike(a, b):
    """The hypotheses of each rank are nearly equally likely."""
    def sums(answer):
        return [sum(c["logprobs"]["token_logprobs"]) for c in answer["choices"]]
    assert len(a["choices"]) == len(b["choices"])
    for x, y, p, q in zip(a["choices"], b["choices"], sums(a), sums(b)):
        assert abs(p - q) < NEAR, (x["text"], p, y["text"], q)
