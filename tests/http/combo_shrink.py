"""Shrinking a failure: remove fields, simplify values, remove concurrent requests, as long
as it still fails in the same way."""

import asyncio
import time

from combo_draw import Raw
from combo_laws import Broken
from combo_run import Bounds

BUDGET_S = 60  # for one failure
COMPANY_TRIES = 4


def simpler(value):
    """Values simpler than this one, simplest first."""
    if isinstance(value, Raw) or isinstance(value, bool) or value is None:
        return
    if isinstance(value, str):
        for text in (
            value[:1],
            value[: len(value) // 2],
            value[len(value) // 2 :],
            value[1:],
            value[:-1],
        ):
            if text != value and text:
                yield text
    elif isinstance(value, (int, float)):
        for number in (0, 1, 2, value // 2 if isinstance(value, int) else round(value)):
            if abs(number) < abs(value):
                yield number
    elif isinstance(value, list):
        half = len(value) // 2
        yield from (
            part
            for part in (value[:1], value[:half], value[half:])
            if part and len(part) < len(value)
        )
        for i, item in enumerate(value[:12]):
            if len(value) > 1:
                yield value[:i] + value[i + 1 :]
            yield from (value[:i] + [s] + value[i + 1 :] for s in simpler(item))
    elif isinstance(value, dict):
        for key in value:
            yield {k: v for k, v in value.items() if k != key}
            yield from (value | {key: s} for s in simpler(value[key]))


class Shrinker:
    """Runs attempts on servers of one configuration; a failed server is replaced."""

    def __init__(self, failure, make_rig, ask, against, with_ids):
        self.failure, self.make_rig = failure, make_rig
        self.ask, self.against, self.with_ids = ask, against, with_ids
        self.rig, self.end = None, time.monotonic() + BUDGET_S

    async def server(self):
        if self.rig and (self.rig.server.process.poll() is not None or self.rig.spoiled):
            await self.close()
        if not self.rig:
            self.rig = await self.make_rig(Bounds(20, 5)).__aenter__()
            self.rig.counts = None
        return self.rig

    async def close(self):
        if self.rig:
            await self.rig.__aexit__(None, None, None)
            self.rig = None

    async def once(self, case, company):
        """The kind of failure of this attempt, or None."""
        rig, f = await self.server(), self.failure
        try:
            if f.mode == "leak":
                await (
                    rig.client.leave(case.route, case.text(), f.phase)
                    if f.phase is not None
                    else self.ask(rig, case)
                )
                rig.spoiled = bool(await rig.leaked())
                return "leak" if rig.spoiled else None
            base = await self.ask(rig, self.with_ids(case, rig.facts))
            if f.mode == "variant":
                others = [asyncio.ensure_future(self.ask(rig, c)) for c in company]
                try:
                    await self.against(rig, case, base, f.variant, f.salt)
                finally:
                    await asyncio.gather(*others, return_exceptions=True)
        except Broken as broken:
            rig.spoiled = broken.kind in ("hang", "connection cut")
            return broken.kind
        finally:
            if rig.fault():
                rig.spoiled = True
        return "the server failed" if rig.fault() else None

    async def fails(self, case, company):
        for _ in range(COMPANY_TRIES if company else 1):
            if await self.once(case, company) == self.failure.kind:
                return True
        return False

    async def send_away(self, case):
        """The fewest concurrent requests that are needed: none, or repeatedly a half."""
        company = self.failure.company if self.failure.mode == "variant" else []
        if not company or await self.fails(case, []):
            return []
        if not await self.fails(case, company):
            return None
        part = len(company) // 2
        while part and time.monotonic() < self.end:
            for at in range(0, len(company), part):
                fewer = company[:at] + company[at + part :]
                if time.monotonic() < self.end and await self.fails(case, fewer):
                    company = fewer
                    break
            else:
                part //= 2
        return company

    async def find_leak(self):
        """The first request of the round after which a gauge stays changed."""
        for case, phase in self.failure.company:
            self.failure.phase = phase
            if time.monotonic() < self.end and await self.once(case, []) == "leak":
                return case
        return None

    async def better(self, case, body, company):
        """The case with this body if it still fails in the same way, else unchanged."""
        return await self.smaller(case, case.with_body(body), company)

    async def smaller(self, case, smaller, company):
        smaller.clean = False  # which nothing tells of another body
        return (
            smaller if time.monotonic() < self.end and await self.fails(smaller, company) else case
        )

    async def unpadded(self, case, company):
        """The case without white space, if it still fails in the same way."""
        bare = case.with_body(case.body)
        bare.padding = 0
        return await self.smaller(case, bare, company) if case.padding else case

    async def without(self, case, key, company):
        if key == case.spoiled:
            return case
        return await self.better(case, {k: v for k, v in case.body.items() if k != key}, company)

    async def with_simpler(self, case, key, company):
        moved = key != case.spoiled
        while moved:
            moved = False
            for value in simpler(case.body[key]):
                smaller = await self.better(case, case.body | {key: value}, company)
                moved = smaller is not case
                if moved:
                    case = smaller
                    break
        return case

    async def run(self):
        f = self.failure
        case = await self.find_leak() if f.mode == "leak" else f.case
        company = [] if f.mode == "leak" else await self.send_away(case)
        if case is None or company is None or not (company or await self.fails(case, [])):
            return
        f.company = company
        case, before = await self.unpadded(case, company), None
        while before != case.body and time.monotonic() < self.end:
            before = case.body
            for key in list(case.body):
                case = await self.without(case, key, company)
            for key in list(case.body):
                case = await self.with_simpler(case, key, company)
        f.small = case


async def shrink(failure, make_rig, ask, against, with_ids):
    """Sets failure.small and failure.company if the failure can be reproduced."""
    if failure.mode == "round":
        return
    shrinker = Shrinker(failure, make_rig, ask, against, with_ids)
    try:
        await shrinker.run()
    finally:
        await shrinker.close()
