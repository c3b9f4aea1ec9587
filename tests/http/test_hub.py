"""Models by hub name, from a local fake hub: `quire serve --model org/name` with HF_ENDPOINT on this machine.

The hub lists files as huggingface.co does and redirects weights to another port, where the token must not arrive. Tests
configure faults on `hub`; every test has its own cache.
"""
import hashlib
import http.server
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import threading
import urllib.parse

import pytest
from conftest import PATIENCE_S, QUIRE, ROOT

DEMO = os.path.join(ROOT, "models", "demo")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "models--quire-test--demo"
FLAGS = ("--device", "cpu", "--kv-cache-memory", "16MiB", "--max-model-len", "128")
TOKEN = "hf_secret"


def git_oid(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sibling(name, data):
    entry = {"rfilename": name, "size": len(data), "blobId": git_oid(data), "lfs": None}
    if name.endswith((".safetensors", ".gguf")):
        entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry


class Hub:
    """Two servers: `endpoint` serves the API and small files, and redirects requests for weights to the other."""

    def __init__(self):
        self.files = {name: open(os.path.join(DEMO, name), "rb").read()
                      for name in ("README.md", "config.json", "generation_config.json", "tokenizer.json", "model.safetensors")}
        self.requests = []      # (port's name, path, headers)
        self.change = lambda siblings: siblings  # of the listing
        self.refuse = None      # (status, X-Error-Code) for the listing
        self.refuse_file = None
        self.body = None        # f(name, data, first, nth request for it) -> (status, first, bytes), or None
        self.before = lambda name: None          # called when a file is asked for
        self.lock = threading.Lock()
        self.servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), self.handler(kind)) for kind in ("hub", "cdn")]
        for s in self.servers:
            s.daemon_threads = True
            threading.Thread(target=s.serve_forever, args=(0.02,), daemon=True).start()
        self.endpoint, self.cdn = (f"http://127.0.0.1:{s.server_port}" for s in self.servers)

    def close(self):
        for s in self.servers:
            s.shutdown()
            s.server_close()

    def asked(self, name):
        return [r for r in self.requests if r[1].rpartition("/")[2] == name and r[0] == "cdn" or
                r[1].rpartition("/")[2] == name and name not in self.on_cdn()]

    def on_cdn(self):
        return [n for n in self.files if n.endswith((".safetensors", ".gguf"))]

    def handler(hub, kind):
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def answer(self, status, body=b"", **headers):
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                try:
                    self.wfile.write(body)
                except OSError:
                    self.close_connection = True

            def refuse(self, why):
                self.answer(why[0], b"<html>no</html>", **({"X_Error_Code": why[1]} if why[1] else {}))

            def do_GET(self):
                with hub.lock:
                    hub.requests.append((kind, self.path, dict(self.headers)))
                path = urllib.parse.urlsplit(self.path).path
                if kind == "hub" and path.startswith("/api/"):
                    return self.listing(path)
                name = path.rpartition("/")[2]
                if kind == "hub" and hub.refuse_file:
                    return self.refuse(hub.refuse_file)
                if kind == "hub" and name in hub.on_cdn():
                    return self.answer(302, Location=hub.cdn + "/stored/" + name)
                return self.file(name)

            def listing(self, path):
                if hub.refuse:
                    return self.refuse(hub.refuse)
                if not re.fullmatch(r"/api/models/quire-test/demo/revision/(main|v1|refs%2Fpr%2F1|" + COMMIT + ")", path):
                    return self.refuse((404, "RevisionNotFound" if path.startswith("/api/models/quire-test/demo/") else "RepoNotFound"))
                siblings = hub.change([sibling(n, d) for n, d in hub.files.items()])
                self.answer(200, json.dumps({"id": "quire-test/demo", "sha": COMMIT, "siblings": siblings}).encode())

            def file(self, name):
                if name not in hub.files:
                    return self.refuse((404, "EntryNotFound"))
                data, wanted = hub.files[name], re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
                first = int(wanted[1]) if wanted else 0
                hub.before(name)
                changed = hub.body and hub.body(name, data, first, len(hub.asked(name)))
                status, start, part = changed or (206 if wanted else 200, first, data[first:])
                self.send_response(status)
                if status == 206:
                    self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
                self.send_header("Content-Length", str(max(len(data) - start, len(part)) if status < 300 else len(part)))
                self.end_headers()
                try:
                    self.wfile.write(part)
                except OSError:
                    pass
                self.close_connection = True

        return Handler


@pytest.fixture
def hub():
    h = Hub()
    yield h
    h.close()


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "hf" / "hub"


@pytest.fixture
def serve(hub, cache, start):
    def begin(model="quire-test/demo", wait=True, **env):
        clean = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(cache.parent), "HF_HUB_CACHE": "", "HUGGINGFACE_HUB_CACHE": "",
                 "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": "", "http_proxy": "", "no_proxy": "*"}
        return start(*FLAGS, model=model, env={**clean, **env}, wait=wait)
    return begin


def fails(server, *texts):
    """Exits with 1 and one line that contains all of `texts`."""
    assert server.process.wait(PATIENCE_S) == 1, server.log
    line = [x for x in server.log.splitlines() if "cannot start" in x]
    assert len(line) == 1 and all(t in line[0] for t in texts), server.log
    assert TOKEN not in server.log


def everything_in(folder):
    return sorted(os.path.relpath(os.path.join(d, n), folder) for d, _, names in os.walk(folder) for n in names)


def leaves_nothing(cache):
    assert [p for p in everything_in(cache) if not p.endswith(".lock")] == []


def lfs_oid(hub, name="model.safetensors"):
    return hashlib.sha256(hub.files[name]).hexdigest()


def test_downloaded_once_and_laid_out_for_others(hub, cache, serve):
    s = serve()
    assert json.loads(s.get("/v1/models"))["data"][0]["id"] == "quire-test/demo"
    s.stop()
    needed = [n for n in hub.files if n != "README.md"]
    repo = cache / REPO
    assert (repo / "refs" / "main").read_text() == COMMIT
    assert sorted(os.listdir(repo / "snapshots" / COMMIT)) == sorted(needed)
    for name in needed:
        link = repo / "snapshots" / COMMIT / name
        oid = lfs_oid(hub) if name == "model.safetensors" else git_oid(hub.files[name])
        assert os.readlink(link) == f"../../blobs/{oid}" and link.read_bytes() == hub.files[name]
    assert len(os.listdir(repo / "blobs")) == len(needed)
    # The token goes to the endpoint and nowhere else.
    assert {h.get("Authorization") for kind, _, h in hub.requests if kind == "hub"} == {"Bearer " + TOKEN}
    assert [h.get("Authorization") for kind, _, h in hub.requests if kind == "cdn"] == [None]
    assert TOKEN not in s.log
    hub.requests.clear()
    assert serve(HF_HUB_OFFLINE="1").stop() == 0
    assert serve().stop() == 0
    assert hub.requests == []


@pytest.mark.parametrize("revision", ["v1", "refs/pr/1", COMMIT])
def test_revisions(hub, cache, serve, revision):
    s = serve("quire-test/demo@" + revision)
    assert json.loads(s.get("/v1/models"))["data"][0]["id"] == "quire-test/demo"
    if revision != COMMIT:
        assert (cache / REPO / "refs" / revision).read_text() == COMMIT
    fails(serve(HF_HUB_OFFLINE="1", wait=False), "revision main", "HF_HUB_OFFLINE")


def test_token_file_and_cache_variables(hub, tmp_path, serve):
    (tmp_path / "home" / ".cache" / "huggingface").mkdir(parents=True)
    (tmp_path / "home" / ".cache" / "huggingface" / "token").write_text("hf_of_file\n")
    hub.refuse = (404, "RepoNotFound")
    fails(serve(HF_TOKEN="", HF_HOME="", XDG_CACHE_HOME="", HOME=str(tmp_path / "home"), wait=False), "no such model")
    assert hub.requests[-1][2]["Authorization"] == "Bearer hf_of_file"
    fails(serve(HF_TOKEN="two words", wait=False), "HF_TOKEN")
    hub.refuse = None
    for variables, folder in (({"HF_HUB_CACHE": str(tmp_path / "c")}, "c"),
                              ({"HF_HOME": "", "XDG_CACHE_HOME": str(tmp_path / "x")}, "x/huggingface/hub"),
                              ({"HF_HOME": "~/h", "HOME": str(tmp_path)}, "h/hub")):
        serve(**variables).stop()
        assert (tmp_path / folder / REPO / "refs" / "main").exists()


def test_taken_up_where_it_stopped(hub, cache, serve):
    """A partial file, then a broken connection, then the rest: every byte is requested once."""
    size = len(hub.files["model.safetensors"])
    blobs = cache / REPO / "blobs"
    blobs.mkdir(parents=True)
    (blobs / (lfs_oid(hub) + ".incomplete")).write_bytes(hub.files["model.safetensors"][:size // 3])
    hub.body = lambda name, data, first, nth: \
        (206, first, data[first:size // 2]) if name == "model.safetensors" and nth == 1 else None
    serve().stop()
    assert [r[2]["Range"] for r in hub.asked("model.safetensors")] == [f"bytes={size // 3}-", f"bytes={size // 2}-"]


@pytest.mark.parametrize("case", ["junk", "ignored", "elsewhere", "busy"])
def test_odd_answers_are_mended(hub, cache, serve, case):
    data = hub.files["model.safetensors"]
    blobs = cache / REPO / "blobs"
    blobs.mkdir(parents=True)
    (blobs / (lfs_oid(hub) + ".incomplete")).write_bytes(b"?" * 1000 if case == "junk" else data[:1000])
    answers = {"ignored": lambda: (200, 0, data), "elsewhere": lambda: (206, 500, data[500:]), "busy": lambda: (503, 0, b"later")}
    hub.body = lambda name, data, first, nth: \
        answers[case]() if name == "model.safetensors" and nth == 1 and case in answers else None
    serve().stop()
    assert (blobs / lfs_oid(hub)).read_bytes() == data
    assert len(hub.asked("model.safetensors")) == (1 if case == "ignored" else 2)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_wrong_bytes(hub, cache, serve, name):
    hub.body = lambda n, data, first, nth: (200, 0, b"\x7f" + data[1:]) if n == name else None
    fails(serve(wait=False), "quire-test/demo", name, "differs, twice")
    assert len(hub.asked(name)) == 2
    assert not (cache / REPO / "refs").exists()
    assert not any(n.startswith(lfs_oid(hub) if name == "model.safetensors" else git_oid(hub.files[name]))
                   for n in os.listdir(cache / REPO / "blobs"))


@pytest.mark.parametrize("lie", [-100, 100])
def test_lying_sizes(hub, cache, serve, lie):
    def change(siblings):
        for s in siblings:
            if s["rfilename"] == "model.safetensors":
                s["lfs"]["size"] += lie
        return siblings
    hub.change = change
    fails(serve(wait=False), "model.safetensors", "longer than the" if lie < 0 else "ends after")
    assert not (cache / REPO / "refs").exists() and not (cache / REPO / "blobs" / lfs_oid(hub)).exists()


@pytest.mark.parametrize("listing,file,text", [
    ((401, "RepoNotFound"), None, "no such model or keeps it private"),
    ((403, ""), None, "keeps it private"),
    ((404, "RevisionNotFound"), None, "has no revision main"),
    ((403, "GatedRepo"), None, "is gated"),
    (None, (403, "GatedRepo"), "is gated: accept its terms"),
    (None, (404, "EntryNotFound"), "does not have "),
    ((418, ""), None, "HTTP status 418"),
])
def test_refusals(hub, cache, serve, listing, file, text):
    hub.refuse, hub.refuse_file = listing, file
    fails(serve(wait=False), "quire-test/demo", text, hub.endpoint if "revision" not in text else "")
    leaves_nothing(cache)


def test_offline_and_unreachable(hub, cache, serve):
    fails(serve(HF_HUB_OFFLINE="1", wait=False), "HF_HUB_OFFLINE", str(cache))
    assert hub.requests == []
    fails(serve(HF_ENDPOINT="http://127.0.0.1:1", wait=False), "http://127.0.0.1:1", "connect")
    fails(serve(HF_ENDPOINT="file:///etc", wait=False), "HF_ENDPOINT")
    leaves_nothing(cache)


def test_disk_too_small(hub, cache, serve):
    hub.change = lambda siblings: [{**s, "lfs": {**s["lfs"], "size": 1 << 49}} if s["lfs"] else s for s in siblings]
    fails(serve(wait=False), "needs 5629", "are free")
    assert hub.asked("model.safetensors") == []


def test_disk_full_meanwhile(hub, cache, tmp_path):
    """Files cannot grow beyond 1 MB: the partial file stays for the next attempt."""
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    env = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(cache.parent), "HF_HUB_CACHE": "", "HF_TOKEN": TOKEN}
    p = subprocess.run([QUIRE, "serve", "--model", "quire-test/demo", "--port", "0", *FLAGS], env=env, preexec_fn=limit,
                       restore_signals=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert p.returncode == 1 and "cannot write model.safetensors: File too large" in p.stderr
    assert (cache / REPO / "blobs" / (lfs_oid(hub) + ".incomplete")).stat().st_size == 1 << 20


@pytest.mark.parametrize("change,text", [
    (lambda s: {**s, "blobId": "../../../evil", "lfs": None}, "no checksum and size"),
    (lambda s: {**s, "lfs": {"sha256": "0" * 63, "size": 1}} if s["lfs"] else s, "no checksum and size"),
    (lambda s: {**s, "lfs": {"sha256": "0" * 64, "size": -1}} if s["lfs"] else s, "no checksum and size"),
    (lambda s: {**s, "rfilename": "../" + s["rfilename"]}, "neither model.safetensors"),
    (lambda s: {**s, "rfilename": "/tmp/" + s["rfilename"]}, "neither model.safetensors"),
    (lambda s: {**s, "rfilename": "config.json"}, "has config.json twice"),
])
def test_hostile_listings(hub, cache, tmp_path, serve, change, text):
    before = everything_in(tmp_path)
    hub.change = lambda siblings: [change(s) for s in siblings]
    fails(serve(wait=False), text)
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize("shard,text", [("../../../evil.safetensors", "not the name of a shard"),
                                        ("model-2.safetensors", "which the hub does not have")])
def test_hostile_index(hub, cache, serve, shard, text):
    del hub.files["model.safetensors"]
    hub.files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": shard}}).encode()
    fails(serve(wait=False), text)
    assert not (cache / REPO / "refs").exists()


def split(data, parts):
    """Split a safetensors file into `parts` shards and an index."""
    size = int.from_bytes(data[:8], "little")
    header, values = json.loads(data[8:8 + size]), data[8 + size:]
    names = sorted(n for n in header if n != "__metadata__")
    files, where = {}, {}
    for i in range(parts):
        own, body = {}, b""
        for name in names[i::parts]:
            first, last = header[name]["data_offsets"]
            own[name] = {**header[name], "data_offsets": [len(body), len(body) + last - first]}
            body += values[first:last]
            where[name] = f"model-{i + 1:05}-of-{parts:05}.safetensors"
        text = json.dumps(own).encode()
        text += b" " * (-len(text) % 8)
        files[f"model-{i + 1:05}-of-{parts:05}.safetensors"] = len(text).to_bytes(8, "little") + text + body
    return {**files, "model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": where}).encode()}


def test_shards_and_what_is_missing_of_a_snapshot(hub, cache, serve):
    hub.files.update(split(hub.files.pop("model.safetensors"), 3))
    hub.files["consolidated.safetensors"] = b"not needed"
    serve().stop()
    assert hub.asked("consolidated.safetensors") == []
    second = "model-00002-of-00003.safetensors"
    os.unlink(cache / REPO / "snapshots" / COMMIT / second)
    os.unlink(cache / REPO / "blobs" / lfs_oid(hub, second))
    fails(serve(HF_HUB_OFFLINE="1", wait=False), "lacks its " + second)
    hub.requests.clear()
    serve().stop()
    assert [path.rpartition("/")[2] for kind, path, _ in hub.requests if kind == "cdn"] == [second]


def test_a_model_in_several_gguf_files(hub, cache, serve):
    names = [f"demo-{i}-of-00003.gguf" for i in ("00001", "00002", "00003")]
    hub.files = {n: n.encode() for n in (*names, "demo-00001-of-00002.gguf")}
    fails(serve("quire-test/demo/" + names[0], wait=False), names[0] + ": not a GGUF file")
    assert sorted(os.listdir(cache / REPO / "snapshots" / COMMIT)) == names
    os.unlink(cache / REPO / "snapshots" / COMMIT / names[2])
    fails(serve("quire-test/demo/" + names[0], HF_HUB_OFFLINE="1", wait=False), "lacks its " + names[2])
    fails(serve("quire-test/demo/demo-00001-of-00002.gguf", wait=False), "has no file demo-00002-of-00002.gguf")


def test_what_cannot_be_served_is_not_downloaded(hub, cache, serve):
    tokenizer = hub.files.pop("tokenizer.json")
    hub.files["tiktoken.model"] = tokenizer
    fails(serve(wait=False), "has no tokenizer at revision main", "tiktoken.model and tekken.json are not read")
    hub.files["tokenizer.json"] = tokenizer
    hub.files.pop("config.json")
    fails(serve(wait=False), "has no config.json at revision main")
    assert not [path for _, path, _ in hub.requests if "/resolve/" in path]
    leaves_nothing(cache)


def test_a_draft_head_needs_no_tokenizer(hub, cache, start, serve):
    """It is downloaded and read; this one is a model, which the engine refuses for what it lacks."""
    hub.files.pop("tokenizer.json")
    for offline in ("", "1"):
        env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(cache.parent), "HF_HUB_CACHE": "", "HF_HUB_OFFLINE": offline}
        s = start(*FLAGS, "--speculate", "draft", "--draft-model", "quire-test/demo", model=DEMO, env=env, wait=False)
        fails(s, "tokenizer.json: No such file or directory; nor is there")
    assert len(hub.asked("model.safetensors")) == 1


def test_gguf_files_in_a_folder(hub, cache, serve):
    """As repositories of large models have them: a folder for each encoding."""
    names = [f"demo-Q4_K_M-{i}-of-00002.gguf" for i in ("00001", "00002")]
    hub.files = {n: n.encode() for n in ("demo-Q8_0-00001-of-00002.gguf", *names)}
    hub.change = lambda siblings: [{**s, "rfilename": ("Q8_0/" if "Q8_0" in s["rfilename"] else "a/Q4_K_M/") + s["rfilename"]}
                                   for s in siblings]
    first = "quire-test/demo/a/Q4_K_M/" + names[0]
    fails(serve(first, wait=False), names[0] + ": not a GGUF file")
    folder = cache / REPO / "snapshots" / COMMIT / "a" / "Q4_K_M"
    assert sorted(os.listdir(folder)) == names
    assert os.readlink(folder / names[1]) == f"../../../../blobs/{lfs_oid(hub, names[1])}"
    assert {path.partition("/resolve/")[2] for kind, path, _ in hub.requests if kind == "hub" and "/resolve/" in path} == \
        {f"{COMMIT}/a/Q4_K_M/{n}" for n in names}
    hub.requests.clear()
    fails(serve(first, HF_HUB_OFFLINE="1", wait=False), names[0] + ": not a GGUF file")
    os.unlink(folder / names[1])
    fails(serve(first, HF_HUB_OFFLINE="1", wait=False), "lacks its a/Q4_K_M/" + names[1])
    assert hub.requests == []
    fails(serve(wait=False), "GGUF files in folders", "quire-test/demo/Q8_0/demo-Q8_0-00001-of-00002.gguf")
    fails(serve("quire-test/demo/Q8_0/demo-Q8_0-00001-of-00002.gguf", wait=False), "has no file Q8_0/demo-Q8_0-00002-of-00002.gguf")


def test_several_gguf_files_without_a_name(hub, cache, serve):
    names = [f"demo-Q8_0-{i}-of-00002.gguf" for i in ("00001", "00002")]
    hub.files = {n: n.encode() for n in names}
    fails(serve(wait=False), names[0] + ": not a GGUF file")
    os.unlink(cache / REPO / "snapshots" / COMMIT / names[1])
    fails(serve(HF_HUB_OFFLINE="1", wait=False), "lacks its " + names[1])


def test_one_gguf_file_of_several(hub, cache, serve):
    hub.files = {n: n.encode() for n in ("demo-Q4_K_M.gguf", "demo-Q8_0.gguf", "demo-mmproj-f16.gguf", "demo-q8_0-00001-of-00002.gguf")}
    fails(serve(wait=False), "demo-Q8_0.gguf")
    fails(serve("quire-test/demo/demo-Q4_K_M.gguf", wait=False), "demo-Q4_K_M.gguf")
    assert sorted(os.listdir(cache / REPO / "snapshots" / COMMIT)) == ["demo-Q4_K_M.gguf", "demo-Q8_0.gguf"]
    fails(serve("quire-test/demo/other.gguf", wait=False), "has no file other.gguf")


def test_two_at_once_fetch_each_file_once(hub, cache, serve):
    """The first server's weights are delayed until the second has requested the list."""
    both = threading.Event()
    hub.before = lambda name: name == "model.safetensors" and both.wait(PATIENCE_S)
    listings = lambda: sum("/api/" in path for _, path, _ in hub.requests)  # noqa: E731
    one, other = serve(wait=False), serve(wait=False)
    for _ in range(100 * PATIENCE_S):
        if listings() == 2:
            break
        threading.Event().wait(0.01)
    assert listings() == 2
    both.set()
    for s in (one, other):
        s.wait_ready()
        s.stop()
    assert {name: len(hub.asked(name)) for name in hub.files if name != "README.md"} == \
        {name: 1 for name in hub.files if name != "README.md"}


def test_links_out_of_the_cache(hub, cache, tmp_path, serve):
    serve().stop()
    link = cache / REPO / "snapshots" / COMMIT / "config.json"
    shutil.copy(link, tmp_path / "config.json")
    os.unlink(link)
    os.symlink(tmp_path / "config.json", link)
    fails(serve(wait=False), "symbolic link out of the model directory")


@pytest.mark.parametrize("name,text", [("no-such-folder", "hub name"), ("org/-name", "hub name"), ("a/b/c", "hub name"),
                                       ("quire-test/demo@../x", "hub name"), ("/absent/dir", "No such file"), ("./a/b", "hub name")])
def test_what_is_no_name(hub, serve, name, text):
    fails(serve(name, wait=False), text)
    assert hub.requests == []
