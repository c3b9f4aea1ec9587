"""Servers of several configurations for tests/http/combinations.py, and a client with many
concurrent requests."""

import asyncio
import json
import os
import re
import shutil
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from combo_draw import CUT, GENERATING, ROUTES, TEXT, width_of  # noqa: E402
from combo_servers import (  # noqa: E402
    COMMON, KEYS, KV_GROUPS, draft_flags, plan_of, smoothing, write_model, write_stored,
)
from conftest import QUIRE, Server  # noqa: E402

# Fields with any value of their schema, with which a request must still be answered.
HARMLESS = {
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "add_special_tokens",
    "logprobs",
    "top_logprobs",
    "parallel_tool_calls",
    "return_token_strs",
}

LEAST_LOOKS = 300  # at the gauges, a hundredth of a second apart, before one counts as changed


def is_sanitized():
    with open(QUIRE, "rb") as f:
        program = f.read()
    return b"__asan_init" in program or b"__tsan_init" in program


class Bounds:
    """When an answer counts as missing: `whole_s` after its request, or when the engine has
    made no step for `still_s` meanwhile. Neither bound is about speed."""

    def __init__(self, whole_s=120.0, still_s=15.0):
        scale = 5 if is_sanitized() else 1
        self.whole_s, self.still_s = whole_s * scale, still_s * scale


class Answer:
    """An answer. `late`: not complete within the bounds. `cut`: the connection ended too
    early."""

    def __init__(self, status=0, headers=None, body=b"", late=False, cut=False):
        self.status, self.headers, self.body, self.late, self.cut = (
            status,
            headers or {},
            body,
            late,
            cut,
        )


class Client:
    """Requests over keep-alive connections."""

    def __init__(self, host, port, keys=(), bounds=None):
        self.host, self.port, self.keys, self.idle = host, port, list(keys), []
        self.bounds = bounds or Bounds()

    def head(self, method, path, length, key=None):
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self.host}",
            "Content-Type: application/json",
            f"Content-Length: {length}",
        ]
        if self.keys:
            lines.append("Authorization: Bearer " + (key or self.keys[0]))
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def connect(self):
        return await asyncio.open_connection(self.host, self.port, limit=1 << 26)

    async def read_answer(self, reader):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {k.lower(): v.strip() for k, v in (h.split(":", 1) for h in head[1:] if h)}
        answer = Answer(int(head[0].split()[1]), headers)
        if headers.get("transfer-encoding") == "chunked":
            parts = []
            while size := int(await reader.readuntil(b"\r\n"), 16):
                parts.append((await reader.readexactly(size + 2))[:-2])
            await reader.readexactly(2)
            answer.body = b"".join(parts)
        else:
            answer.body = await reader.readexactly(int(headers.get("content-length", 0)))
        return answer

    async def exchange(self, method, path, body, key):
        fresh = not self.idle
        reader, writer = self.idle.pop() if self.idle else await self.connect()
        try:
            writer.write(self.head(method, path, len(body), key) + body)
            await writer.drain()
            answer = await self.read_answer(reader)
        except (OSError, asyncio.IncompleteReadError, ValueError) as e:
            writer.close()
            if not fresh:  # a connection that was kept may be closed by now
                return await self.exchange(method, path, body, key)
            return Answer(cut=True, body=repr(e).encode())
        except BaseException:
            writer.close()
            raise
        if answer.headers.get("connection", "").lower() == "close":
            writer.close()
        else:
            self.idle.append((reader, writer))
        return answer

    async def get(self, path):
        return await asyncio.wait_for(self.exchange("GET", path, b"", None), self.bounds.whole_s)

    async def steps(self):
        """Steps of the engine so far; None if the server does not report them."""
        try:
            page = (
                await asyncio.wait_for(self.exchange("GET", "/metrics", b"", None), 20)
            ).body.decode()
        except (asyncio.TimeoutError, OSError):
            return None
        found = re.search(r"iteration_tokens_total_count\S* (\d+)", page)
        return int(found[1]) if found else None

    async def post(self, path, text, key=None):
        """The answer to one request, or one that is `late`."""
        task = asyncio.ensure_future(
            self.exchange("POST", path, text.encode("utf-8", "surrogatepass"), key)
        )
        began = moved = time.monotonic()
        seen = None
        while not (await asyncio.wait({task}, timeout=2))[0]:
            steps, now = await self.steps(), time.monotonic()
            if steps is not None and steps != seen:
                seen, moved = steps, now
            if now - began > self.bounds.whole_s or now - moved > self.bounds.still_s:
                task.cancel()
                await asyncio.wait({task})
                return Answer(late=True)
        return task.result()

    async def leave(self, path, text, phase, key=None):
        """A client that disconnects: 0 within its body, 1 after it, 2 after the first bytes
        of the answer, 3 later."""
        body = text.encode("utf-8", "surrogatepass")
        try:
            reader, writer = await self.connect()
            sent = self.head("POST", path, len(body), key) + body
            writer.write(sent[: -1 - len(body) // 2] if phase == 0 else sent)
            await writer.drain()
            if phase >= 2:
                await asyncio.wait_for(reader.read(1 if phase == 2 else 1500), self.bounds.whole_s)
            writer.transport.abort()
        except (OSError, asyncio.TimeoutError):
            pass

    def close(self):
        for _, writer in self.idle:
            writer.close()
        self.idle.clear()


# ---- what is known of a server ----


def byte_level():
    """The mapping of characters to bytes in GPT-2's byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


class Facts:
    """The facts from which bodies are generated and answers checked: the OpenAPI document,
    the vocabulary, the pool."""

    def __init__(self, model_dir):
        self.schemas, self.known, self.keys = {}, HARMLESS, []
        self.kv_groups = 1  # each of which may need as many blocks as all tokens fill
        if model_dir is None:
            self.bytes, self.special, self.eos = [bytes([b]) for b in range(256)], set(), []
            return
        with open(os.path.join(model_dir, "tokenizer.json"), encoding="utf-8") as f:
            tokenizer = json.load(f)
        with open(os.path.join(model_dir, "config.json"), encoding="utf-8") as f:
            eos = json.load(f)["eos_token_id"]
        self.eos = eos if isinstance(eos, list) else [eos]
        table, vocab = byte_level(), tokenizer["model"]["vocab"]
        self.special = {t["id"] for t in tokenizer["added_tokens"] if t["special"]}
        self.bytes = [b""] * (1 + max(vocab.values()))
        for token, i in vocab.items():
            self.bytes[i] = token.encode() if i in self.special else bytes(table[c] for c in token)

    def read_openapi(self, document):
        for path, methods in document["paths"].items():
            body = (
                methods.get("post", {})
                .get("requestBody", {})
                .get("content", {})
                .get("application/json")
            )
            # Responses and messages are drawn as chats over another API (combo_agents.py).
            if body and path in ROUTES:
                self.schemas[path] = document["components"]["schemas"][
                    body["schema"]["$ref"].rsplit("/", 1)[1]
                ]
                self.schemas[path].setdefault("required", [])

    async def learn(self, client):
        self.read_openapi(json.loads((await client.get("/openapi.json")).body))
        model = json.loads((await client.get("/v1/models")).body)["data"][0]
        self.model, self.max_model_len = model["id"], model["max_model_len"]
        picture = await debug_kv(client)
        self.chat, self.max_num_seqs = picture["chat"], picture["max_num_seqs"]
        self.block_size, self.blocks = picture["pool"]["block_size"], picture["pool"]["blocks"]
        self.host_blocks = picture["pool"]["host_blocks"]
        if not self.chat:  # a model without a template refuses every chat alike
            self.schemas.pop("/v1/chat/completions", None)
        answer = await client.post(
            "/tokenize", json.dumps({"prompt": TEXT, "add_special_tokens": False})
        )
        self.likely_ids = sorted(set(json.loads(answer.body)["tokens"]))

    def prompt_bound(self, route, body):
        """An upper bound of the tokens of each prompt."""
        bound = self.text_bound(route, body)
        return min(bound, body.get(CUT) or bound)

    def text_bound(self, route, body):
        """The same before it is cut."""
        if route == "/v1/chat/completions":
            text = json.dumps(body["messages"], ensure_ascii=False)
            return len(text.encode()) + 20
        prompt = body["prompt"]
        if isinstance(prompt, str):
            return len(prompt.encode()) + 1
        if isinstance(prompt[0], int):
            return len(prompt)
        return max(len(p.encode()) + 1 if isinstance(p, str) else len(p) for p in prompt)

    def fits(self, route, body):
        """Whether the request certainly fits into the pool."""
        if route not in GENERATING:
            return False
        most = body.get("max_completion_tokens") or body.get("max_tokens")
        most = 16 if most is None else most
        tokens, width = self.prompt_bound(route, body) + most, width_of(body)
        need = self.kv_groups * width * -(-tokens // self.block_size)
        room = min(self.blocks, self.host_blocks or self.blocks)
        return tokens <= self.max_model_len and width <= self.max_num_seqs and need <= room


async def debug_kv(client):
    """One snapshot of the pool. So many may watch it at once; clients that left still count
    until the server has noticed."""
    for _ in range(100):
        picture = await first_picture(client)
        if "pool" in picture:
            return picture
        await asyncio.sleep(0.1)
    return picture


async def first_picture(client):
    reader, writer = await client.connect()
    writer.write(client.head("GET", "/debug/kv", 0))
    try:
        await reader.readuntil(b"data: ")
        return json.loads(await reader.readuntil(b"\n\n"))
    finally:
        writer.close()


class Rig:
    """A server of one configuration, with its facts."""

    def __init__(self, name, bounds=None):
        self.name, self.bounds, self.folder = (
            name,
            bounds,
            tempfile.mkdtemp(prefix="quire-combinations-"),
        )
        self.server = self.client = self.counts = None
        self.flags = ""  # of the server
        self.exact = True  # see Plan
        self.spoiled = False

    async def __aenter__(self):
        plan = plan_of(self.name)
        self.exact = plan.exact
        more, env = smoothing(plan, self.folder)
        flags = COMMON + plan.flags + more + draft_flags(plan, self.folder)
        keys = re.findall(r"key=(\S+)", KEYS) if self.name == "fair" else []
        if keys:
            flags = flags + ["--api-key-file", self.write("keys", KEYS)]
        model = None if plan.model == "null" else write_model(plan, self.folder)
        self.flags = " ".join(flags)
        served = write_stored(plan, model) if model else "null"
        self.server = Server(*flags, model=served, env=plan.env | env)
        self.client = Client(self.server.host, self.server.port, keys, self.bounds)
        self.facts = Facts(model)
        self.facts.keys, self.facts.greedy = keys, model is not None
        self.facts.kv_groups = KV_GROUPS.get(plan.model, 1)
        await self.facts.learn(self.client)
        self.rest = await self.gauges()
        return self

    async def __aexit__(self, *error):
        if self.client:
            self.client.close()
        if self.server and self.server.process.poll() is None:
            self.server.process.kill()
            self.server.process.wait()
        self.remove()

    def remove(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)
        os.chmod(path, 0o600)
        return path

    async def gauges(self):
        """All gauges of /metrics except the number of connections: they must return to their
        old values."""
        page = (await self.client.get("/metrics")).body.decode()
        names = set(re.findall(r"^# TYPE (\S+) gauge", page, re.M)) - {"quire_http_connections"}
        lines = re.findall(r"^([^#\s{]+)(\{\S*\})? (\S+)$", page, re.M)
        values = {n + labels: float(v) for n, labels, v in lines if n in names}
        pool = (await debug_kv(self.client))["pool"]
        return values | {"pool used": pool["used"], "pool host_used": pool["host_used"]}

    async def leaked(self):
        """The gauges that have not returned to their values in time, as text, or ""."""
        end, looks = time.monotonic() + self.client.bounds.still_s, 0
        while True:
            held = await self.gauges()
            left = {k: v for k, v in held.items() if v != self.rest.get(k, 0)}
            looks += 1  # the machine, with the server, may have stood still meanwhile
            if not left or (time.monotonic() > end and looks > LEAST_LOOKS):
                return ", ".join(
                    f"{k} is {v:g}, not {self.rest.get(k, 0):g}" for k, v in left.items()
                )
            await asyncio.sleep(0.01)

    async def preemptions(self):
        page = (await self.client.get("/metrics")).body.decode()
        return sum(int(n) for n in re.findall(r"^quire_num_preemptions_total\S* (\d+)", page, re.M))

    def stop(self):
        """Stops the server; returns its exit status."""
        self.client.close()
        return self.server.stop(seconds=self.client.bounds.whole_s)

    def fault(self):
        """The reason why the server is broken: it exited, or a sanitizer reported; "" if
        there is none."""
        log = self.server.log
        found = re.search(
            r"^.*(ERROR: AddressSanitizer|ERROR: LeakSanitizer|WARNING: ThreadSanitizer"
            r"|runtime error:|[Aa]ssertion).*$",
            log,
            re.M,
        )
        if found:
            return log[found.start() : found.start() + 3000]
        status = self.server.process.poll()
        return "" if status is None else f"the server ended with status {status}: {log[-2000:]}"


class Remote(Rig):
    """A running server, of which only its API is known."""

    def __init__(self, url, bounds=None):
        super().__init__(url, bounds)

    async def __aenter__(self):
        host, port = re.fullmatch(r"http://\[?([^\]/]*?)\]?:(\d+)/?", self.name).groups()
        self.client = Client(
            host, int(port), [k for k in [os.environ.get("QUIRE_API_KEY")] if k], self.bounds
        )
        self.facts = Facts(None)
        self.facts.bytes, self.facts.greedy = None, True
        await self.facts.learn(self.client)
        self.rest = await self.gauges()
        return self

    def fault(self):
        return ""

    def stop(self):
        return 0
