"""Requests in each other's company: what each of them is answered must be what it is answered alone."""
import concurrent.futures
import os

# As tests/gpu: where results have the same bits in any company, "cpu" or "cuda". Tests of several ranks or stages run
# on CPUs alone.
DEVICE = os.environ.get("QUIRE_GPU_DEVICE", "cpu")
ON = ("--device", DEVICE) + (() if DEVICE == "cpu" else ("--deterministic", "true"))

STORY = "Once upon a time there was a little dog who lived by the sea. Every day he went "

BODIES = [
    dict(prompt=STORY * 3 + "to the beach", max_tokens=60, temperature=0),
    dict(prompt=STORY * 2, max_tokens=80, temperature=0.8, seed=3, n=3),
    dict(prompt=STORY * 2 + "home", max_tokens=70, temperature=1, seed=5, repetition_penalty=1.1,
         frequency_penalty=0.5),
    dict(prompt=STORY, max_tokens=50, n=2, best_of=2, use_beam_search=True, temperature=0),
    dict(prompt=STORY * 3 + "to the wood", max_tokens=40, temperature=0.7, seed=9, best_of=3, n=2),
    dict(prompt="The cat", max_tokens=90, temperature=0, ignore_eos=True),
]

# Texts that one request starts in the same step, and that together outgrow a small pool: some
# are preempted however slow the machine is, while it is a matter of time which of BODIES meet.
CROWD = dict(prompt=["The cat", "The dog", "Once upon", "At home"], max_tokens=110, temperature=0.8,
             seed=4, n=2, ignore_eos=True)


def ask(server, body):
    """The ids of each choice."""
    answer = server.ask("POST", "/v1/completions", json=body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    return [c["token_ids"] for c in answer.json()["choices"]]


def ask_each(server):
    return [ask(server, body) for body in BODIES]


def ask_all(server, times=1):
    with concurrent.futures.ThreadPoolExecutor(len(BODIES) * times) as pool:
        return list(pool.map(lambda body: ask(server, body), BODIES * times))


def ask_crowd_apart(server):
    """The crowd's texts, one prompt after the other."""
    return sum((ask(server, CROWD | {"prompt": prompt}) for prompt in CROWD["prompt"]), [])


def check_company(server, want, crowd, rounds=1, preempts=True):
    """What was answered alone is answered again, each alone and all at once. The crowd must be
    answered while some of it is preempted, unless there is room for all."""
    assert ask_each(server) == want
    for _ in range(rounds):
        assert ask_all(server, 2) == want * 2
    preempted = server.metric("num_preemptions_total")
    assert ask(server, CROWD) == crowd
    assert not preempts or server.metric("num_preemptions_total") > preempted
