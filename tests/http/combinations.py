#!/usr/bin/env python3
"""Random combinations of all request fields, each alone and among other requests, against
servers with small pools.

    tests/http/combinations.py [--runs 20000] [--seed N] [--configs swap,null] [--url http://…]

Every request is generated from the server's own /openapi.json (combo_draw.py), sent to
an idle server, then sent again among others and in another form (combo_variants.py),
while clients disconnect; a small pool makes requests queue, be preempted and resume. In
deterministic mode the answers must be equal. Each must satisfy the laws of
combo_laws.py, and afterwards every gauge must have its old value. A failure is shrunk to
a small body; the printed seed and batch replay it:

    tests/http/combinations.py --seed N --batch B

With --url a running server is tested; it must be in deterministic mode and have no other
clients. Its gauges are compared, too; texts are not compared with token ids. QUIRE_BIN
names the server's program.
"""
import argparse
import asyncio
import json
import os
import random
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from combo_draw import GENERATING, SKIP, Case, draw_case  # noqa: E402
from combo_laws import Broken, check, compare, need  # noqa: E402
from combo_run import Bounds, Remote, Rig  # noqa: E402
from combo_servers import CONFIGS, DEVICE, DRAWN  # noqa: E402
from combo_shrink import shrink  # noqa: E402
from combo_variants import VARIANTS, choose, names_for  # noqa: E402

CASES = 20  # of a round
ROUNDS = 4  # of a batch: one server


class Failure:
    """A failure, with all that is needed to reproduce it."""

    def __init__(self, broken, case, mode, variant=None, company=(), phase=None):
        self.kind, self.detail, self.case = broken.kind, broken.detail, case
        self.mode, self.variant, self.company, self.phase = mode, variant, list(company), phase
        self.config = self.seed = self.batch = self.salt = None
        self.small, self.times, self.flags = None, 1, ""

    def line(self):
        how = {
            "alone": "",
            "variant": f" against {self.variant}",
            "leak": f" client leaves in phase {self.phase}",
        }
        company = f" in the company of {len(self.company)}" if self.company else ""
        case = self.small or self.case
        small = "" if self.small else " (not shrunk)"
        return (
            f"[{self.config}] {self.kind}{how.get(self.mode, '')}{company}: {case!r}{small}"
            f"  --seed {self.seed} --batch {self.batch}  {self.detail[:400]}  {self.flags}"
        )

    def covers(self, later):
        """Whether a later failure is probably the same one: of the same kind, with
        all fields that this one needs."""
        mine = self.small or self.case
        fields = {k for k, v in mine.body.items() if k not in ("prompt", "messages")}
        return (
            later.kind == self.kind
            and later.case.route == mine.route
            and fields <= later.case.body.keys() | {"stop", "return_token_ids"}
        )


class Counts:
    """Counters of a run."""

    def __init__(self):
        self.runs = self.asked = self.accepted = self.refused = self.busy = self.left = (
            self.preempted
        ) = self.long = 0

    def add(self, status, case):
        self.asked += 1
        self.long += case.is_long()
        self.accepted += status == 200
        self.refused += 400 <= status < 429
        self.busy += status in (429, 503)

    def __str__(self):
        return (
            f"{self.runs} combinations, {self.asked} requests, {self.long} of them long: "
            f"{self.accepted} accepted, {self.refused} refused, "
            f"{self.busy} turned away, {self.left} clients left, {self.preempted} preemptions"
        )


def with_ids(case, facts):
    """The case with return_token_ids, unless it sets the field itself."""
    if (
        "return_token_ids" in case.body
        or "return_token_ids" not in facts.schemas[case.route]["properties"]
    ):
        return case
    return case.with_body(case.body | {"return_token_ids": True})


async def ask(rig, case, key=None, patient=True):
    """One request's Outcome; Broken if a law does not hold. If the queue is full, the
    request is repeated for a while."""
    for wait in (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 0):
        answer = await rig.client.post(case.route, case.text(), key)
        if answer.status not in (429, 503) or not patient or not wait:
            break
        await asyncio.sleep(wait)
    if rig.counts:
        rig.counts.add(answer.status, case)
    return check(case, answer, rig.facts)


async def against(rig, case, base, name, salt):
    """Sends a case in another form and compares; `name` None: unchanged. Where a server's
    answers depend on their company, each has only the laws of its own."""
    if name is None:
        kind, other = "alone or in company", await ask(rig, case)
        if rig.exact:
            compare(base, other, kind, names_for(case, rig.facts))
        return
    made = VARIANTS[name](random.Random(salt), case, base, rig.facts)
    if made:
        twin, comparer = made
        outcome = await ask(rig, twin)
        full = outcome.status in (429, 503) or base.status in (429, 503)
        if rig.exact and not full:
            comparer(base, outcome)


async def caught(coroutine, case, mode, **more):
    """The Failure of the coroutine, or None."""
    try:
        await coroutine
        return None
    except Broken as broken:
        return Failure(broken, case, mode, **more)


async def alone(rig, cases):
    """Each alone on the server: outcomes (None if it failed) and failures."""
    outcomes, failures = [], []
    for case in cases:
        try:
            outcomes.append(await ask(rig, with_ids(case, rig.facts)))
        except Broken as broken:
            outcomes.append(None)
            failures.append(Failure(broken, case, "alone"))
    return outcomes, failures


async def together(rig, rng, cases, outcomes, salt):
    """All concurrently, as generated and in another form, among clients that disconnect."""
    jobs, company = [], [c for c, o in zip(cases, outcomes) if o]
    for case, base in zip(cases, outcomes):
        if base is None:
            continue
        for name in (None, choose(rng, case, base, rig.facts)):
            jobs.append(
                caught(
                    against(rig, case, base, name, salt),
                    case,
                    "variant",
                    variant=name,
                    company=company,
                )
            )
    leavers = [(draw_case(rng, rig.facts), rng.randrange(4)) for _ in range(len(cases) // 2)]
    jobs += [rig.client.leave(c.route, c.text(), phase) for c, phase in leavers]
    rng.shuffle(jobs)
    limit = asyncio.Semaphore(rng.choice([16, 32, 64]))

    async def one(job):
        async with limit:
            return await job

    found = await asyncio.gather(*map(one, jobs))
    rig.counts.left += len(leavers)
    return [f for f in found if f], leavers


async def play_round(rig, seed, n):
    """One round: its failures."""
    rng = random.Random(seed)
    cases = [draw_case(rng, rig.facts) for _ in range(n)]
    outcomes, failures = await alone(rig, cases)
    more, leavers = await together(rig, rng, cases, outcomes, seed)
    failures += more
    rig.counts.runs += n
    if not rig.fault():
        left = await rig.leaked()
        if left:
            failures.append(
                Failure(
                    Broken("leak", left),
                    cases[0],
                    "leak",
                    company=[(c, None) for c in cases] + leavers,
                )
            )
    if rig.fault():
        failures.append(
            Failure(Broken("the server failed", rig.fault()), cases[0], "round", company=cases)
        )
    return failures


# ---- a run ----


def server_of(options, batch):
    """The name of a batch's server."""
    name = options.configs[batch % len(options.configs)]
    return f"{name}:{options.seed}:{batch}" if name in (DRAWN, DEVICE) else name


async def play_batch(options, counts, batch, n, rounds=ROUNDS):
    """One server, some rounds: failures."""
    name, failures = server_of(options, batch), []
    async with (
        Remote(options.url, options.bounds) if options.url else Rig(name, options.bounds)
    ) as rig:
        rig.counts, left = counts, n
        for number in range(rounds):
            if left <= 0 or failures:
                break
            found = await play_round(rig, f"{options.seed}/{batch}/{number}", min(CASES, left))
            left -= CASES
            for failure in found:
                failure.config, failure.seed, failure.batch = rig.name, options.seed, batch
                failure.flags = rig.flags
                failure.salt = f"{options.seed}/{batch}/{number}"
            failures += found
        if not rig.fault():
            counts.preempted += await rig.preemptions()
        if not failures:
            need(rig.stop() == 0, "the server did not end well", rig.fault())
    return failures


async def sort_out(options, known, failures, say):
    """Shrinks new failures and adds them to `known`."""
    for failure in failures:
        same = next((k for k in known if k.covers(failure)), None)
        if same:
            same.times += 1
            continue
        known.append(failure)
        if options.shrink and not options.url:
            await shrink(
                failure, lambda bounds: Rig(failure.config, bounds), ask, against, with_ids
            )
        say(failure)


async def play(options, say=lambda failure: None, progress=lambda text: None):
    """A run with these options: (Counts, distinct failures)."""
    counts, known = Counts(), []
    batch, last = options.batch if options.batch is not None else 0, time.monotonic()
    while counts.runs < options.runs:
        before = counts.runs
        try:
            failures = await play_batch(
                options, counts, batch, min(CASES * ROUNDS, options.runs - counts.runs)
            )
        except Broken as broken:
            failures = [Failure(broken, Case("", {}), "round")]
            failures[0].config, failures[0].seed, failures[0].batch = (
                server_of(options, batch),
                options.seed,
                batch,
            )
        await sort_out(options, known, failures, say)
        batch += 1
        if options.batch is not None or len(known) >= options.most or counts.runs == before:
            break
        if time.monotonic() - last > 30:
            last = time.monotonic()
            progress(str(counts))
    return counts, known


def parse_options(argv=None):
    p = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--runs", type=int, default=20000, help="combinations to draw")
    p.add_argument(
        "--seed",
        type=int,
        default=None,
        help="of everything that is drawn; by default a new one, which is printed",
    )
    p.add_argument("--batch", type=int, default=None, help="only this one, to see a failure again")
    p.add_argument(
        "--configs",
        default=",".join(f"{name},{DRAWN}" for name in CONFIGS),
        help=f"servers, in turn; {DRAWN}: a new one each time; {DEVICE}: likewise of one process",
    )
    p.add_argument("--url", help="a server that runs already, in place of those")
    p.add_argument(
        "--most", type=int, default=20, help="distinct failures after which the run ends"
    )
    p.add_argument(
        "--no-shrink", dest="shrink", action="store_false", help="failures as they were drawn"
    )
    p.add_argument("--found", help="file that failures are appended to as they are found")
    options = p.parse_args(argv)
    options.configs = options.configs.split(",")
    options.seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    options.bounds = Bounds()
    return options


def main():
    options = parse_options()
    print(f"seed {options.seed}", flush=True)

    def say(failure):
        print("FAILED " + failure.line(), flush=True)
        if options.found:
            with open(options.found, "a", encoding="utf-8") as f:
                f.write(failure.line().replace("\n", " ") + "\n")

    began = time.monotonic()
    counts, known = asyncio.run(play(options, say, lambda text: print(text, flush=True)))
    for failure in known:
        if failure.times > 1:
            print(f"{failure.times} times: {failure.line()[:160]}")
    print(
        f"{counts}; {len(known)} distinct failures; "
        f"seed {options.seed}, {time.monotonic() - began:.0f} s"
    )
    return 1 if known else 0


if __name__ == "__main__":
    sys.exit(main())
