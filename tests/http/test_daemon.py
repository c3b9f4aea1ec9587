"""The daemon from outside: start, keys, CORS, sockets, TLS, health, SIGTERM."""
import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from conftest import PACED, PATIENCE_S, QUIRE, clean_environment
from raw import Reader, error_of, events, post

LONG = dict(prompt="x", max_tokens=30000, ignore_eos=True)  # five minutes on a delayed server


def run(*args, **env):
    return subprocess.run([QUIRE, *args], capture_output=True, text=True, timeout=PATIENCE_S,
                          env=clean_environment() | env)


# ---- commands ----

def test_commands():
    assert run().returncode == 0 and "usage: quire COMMAND" in run().stdout
    assert run("version").stdout.startswith("quire ")
    assert run("serve", "--help").returncode == 0 and "--max-num-seqs" in run("serve", "--help").stdout
    assert "port" in run("config", "--port", "9001").stdout
    bad = run("frobnicate")
    assert bad.returncode == 2 and "no command 'frobnicate'" in bad.stderr
    bad = run("serve", "--prot", "1")
    assert bad.returncode == 2 and "--port" in bad.stderr


@pytest.mark.parametrize("command", [["version"], ["config"], ["serve", "--help"], ["simulate", "--requests", "5"],
                                     ["bench", "offline", "null", "--requests", "2", "--output-len", "3"]])
def test_output_to_a_full_disk_is_a_failure(command):
    with open("/dev/full", "w") as full:
        p = subprocess.run([QUIRE, *command], stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    assert p.returncode == 1 and "disk full" in p.stderr


def test_health_command(start):
    s = start()
    assert run("health", "--url", s.url).returncode == 0
    assert run("health", "--port", str(s.port)).returncode == 0
    assert run("health", QUIRE_PORT=str(s.port)).returncode == 0
    s.stop()
    gone = run("health", "--url", s.url)
    assert gone.returncode == 1 and "no server at" in gone.stderr
    assert run("health", "--url", "nonsense").returncode == 2


def test_busy_port(start):
    s = start()
    other = run("serve", "--model", "null", "--port", str(s.port))
    assert other.returncode == 1 and f"port {s.port}" in other.stderr and "in use" in other.stderr
    assert len(other.stderr.strip().splitlines()) == 1


def test_missing_model(tmp_path):
    for model, why in (("/nonexistent/model", "No such file"), (str(tmp_path), "no config.json"), ("/dev/null", "neither")):
        bad = run("serve", "--model", model, "--port", "0")
        assert bad.returncode == 1 and "cannot start" in bad.stderr and model in bad.stderr and why in bad.stderr
        assert len(bad.stderr.strip().splitlines()) == 1


def test_bad_host():
    bad = run("serve", "--model", "null", "--host", "203.0.113.7", "--port", "0")
    assert bad.returncode == 1 and "203.0.113.7" in bad.stderr


# ---- keys and pages ----

def test_api_keys(start, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# operators\nfrom-file\n")
    s = start("--api-key", "key-one", "--api-key-file", str(keys))

    def status(path, key=None, method="GET"):
        return s.ask(method, path, headers={"Authorization": key} if key else {}).status_code

    assert status("/health") == status("/ping") == 200
    for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nothing"):
        a = s.ask("GET", path)
        assert a.status_code == 401 and a.headers["www-authenticate"] == "Bearer"
        assert error_of(a.content)["type"] == "authentication_error"
    assert status("/v1/models", "Bearer key-one") == status("/v1/models", "Bearer from-file") == 200
    for wrong in ("Bearer two", "Bearer key-on", "Bearer key-onee", "key-one", "Basic key-one", "Bearer # operators"):
        assert status("/v1/models", wrong) == 401
    a = s.ask("POST", "/v1/completions", json=dict(prompt="x"))
    assert a.status_code == 401
    assert "key-one" not in s.log and "from-file" not in s.log


def test_api_key_from_the_environment(start):
    s = start(env={"QUIRE_API_KEY": "secret"})
    assert s.ask("GET", "/v1/models").status_code == 401
    assert s.ask("GET", "/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_cors(start):
    s = start("--cors-origins", "https://a.example, https://b.example", "--api-key", "k")
    ask = {"Origin": "https://b.example", "Access-Control-Request-Method": "POST"}
    a = s.ask("OPTIONS", "/v1/completions", headers=ask)
    assert a.status_code == 204 and a.headers["access-control-allow-origin"] == "https://b.example"
    assert "POST" in a.headers["access-control-allow-methods"] and "Authorization" in a.headers["access-control-allow-headers"]
    a = s.ask("POST", "/v1/completions", json=dict(prompt="x"), headers={"Origin": "https://b.example", "Authorization": "Bearer k"})
    assert a.status_code == 200 and a.headers["access-control-allow-origin"] == "https://b.example"
    a = s.ask("GET", "/health", headers={"Origin": "https://c.example"})
    assert "access-control-allow-origin" not in a.headers


# ---- sockets ----

def test_unix_socket(start, tmp_path):
    path = str(tmp_path / "q.sock")
    s = start("--uds", path)
    assert s.url == "unix:" + path
    with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://q") as c:
        assert c.get("/health").json() == {"status": "ready"}
        body = c.post("/v1/completions", json=dict(prompt="x", max_tokens=9, stream=True)).content
        assert len(events(body)) == 10
    assert run("health", "--url", s.url).returncode == 0
    assert run("serve", "--model", "null", "--uds", path).returncode == 1
    assert s.stop() == 0
    again = start("--uds", path)  # the path of a dead server is replaced
    assert again.stop() == 0


def test_ipv6(start):
    if not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6") or not open("/proc/net/if_inet6").read():
        pytest.skip("no IPv6 here")
    s = start("--host", "::1")
    assert s.url.startswith("http://[::1]:")
    assert s.ask("GET", "/health").status_code == 200
    assert run("health", "--url", s.url).returncode == 0


@contextlib.contextmanager
def serving_inherited(redirections=""):
    """A server with an inherited socket, as from systemd: its process and its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = "http://127.0.0.1:%d" % listener.getsockname()[1]
        script = f'exec 3<&{listener.fileno()} {redirections}; export LISTEN_FDS=1 LISTEN_PID=$$; exec "{QUIRE}" serve --model null'
        p = subprocess.Popen(["bash", "-c", script], pass_fds=[listener.fileno()], stderr=subprocess.DEVNULL)
    try:
        while httpx.get(url + "/health", timeout=PATIENCE_S).status_code != 200:
            assert p.poll() is None
            time.sleep(0.01)
        a = httpx.post(url + "/v1/completions", json=dict(prompt="x", max_tokens=5), timeout=PATIENCE_S)
        assert a.status_code == 200
        yield p
    finally:
        p.terminate()
        assert p.wait(PATIENCE_S) == 0


def test_inherited_socket():
    with serving_inherited() as p:
        assert p.poll() is None


def test_log_to_a_full_disk_stops_nothing():
    with serving_inherited("2>/dev/full") as p:
        assert os.readlink(f"/proc/{p.pid}/fd/2") == "/dev/full"


def test_a_log_that_may_not_grow_stops_nothing(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"x" * 1024)
    with serving_inherited(f"2>>'{log}'; ulimit -f 1") as p:
        assert p.poll() is None
    assert log.stat().st_size == 1024


def test_few_open_files_are_refused_at_start():
    for limit in (32, 255):
        bad = subprocess.run(["bash", "-c", f'ulimit -n {limit}; exec "{QUIRE}" serve null --port 0'],
                             capture_output=True, text=True, timeout=PATIENCE_S, env=clean_environment())
        assert bad.returncode == 1 and f"open files is {limit} and must be at least 256" in bad.stderr
        assert len(bad.stderr.strip().splitlines()) == 1


def test_closed_standard_files_are_given_to_nothing_else():
    with serving_inherited("<&- >&- 2>&-") as p:
        assert {os.readlink(f"/proc/{p.pid}/fd/{n}") for n in range(3)} == {"/dev/null"}


def test_tls(start, tmp_path):
    cert, key = str(tmp_path / "c.pem"), str(tmp_path / "k.pem")
    made = subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
                           "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert], capture_output=True)
    if made.returncode:
        pytest.skip("openssl made no certificate")
    s = start("--ssl-certfile", cert, "--ssl-keyfile", key)
    assert s.url.startswith("https://")
    with httpx.Client(base_url=s.url, verify=ssl.create_default_context(cafile=cert), timeout=PATIENCE_S) as c:
        assert c.get("/health").json() == {"status": "ready"}
        ask = dict(prompt="x", max_tokens=3000, seed=1)
        whole = c.post("/v1/completions", json=ask).json()["choices"][0]["text"]
        parts = events(c.post("/v1/completions", json=dict(ask, stream=True)).content)
        assert parts[-1] == "[DONE]" and "".join(json.loads(p)["choices"][0]["text"] for p in parts[:-1]) == whole
        with c.stream("POST", "/v1/completions", json=dict(prompt="x", max_tokens=30000, n=4, stream=True)) as a:
            next(a.iter_bytes())
    deadline = time.monotonic() + PATIENCE_S
    with httpx.Client(base_url=s.url, verify=False, timeout=PATIENCE_S) as c:
        while 'http_streams{model_name="null"} 0' not in c.get("/metrics").text:
            assert time.monotonic() < deadline
    assert s.stop() == 0


def wait_health(s, status, state):
    deadline = time.monotonic() + PATIENCE_S
    while (a := s.ask("GET", "/health")).status_code != status or a.json() != {"status": state}:
        assert time.monotonic() < deadline, a.text
        time.sleep(0.02)


# ---- the log ----

def test_log_has_no_prompt(start):
    s = start("--log-level", "debug")
    s.ask("POST", "/v1/completions", json=dict(prompt="SECRET-PROMPT", max_tokens=3), headers={"X-Request-Id": "r1"})
    s.ask("POST", "/v1/completions", json=dict(prompt="SECRET-PROMPT", n=0))
    assert s.stop() == 0
    line = [x for x in s.log.splitlines() if "id=r1" in x][0]
    assert "route=/v1/completions status=200" in line and "completion_tokens=3" in line and "prompt_tokens=13" in line
    assert "SECRET" not in s.log


def test_json_log(start):
    s = start("--log-format", "json")
    s.ask("GET", "/version")
    s.stop()
    lines = [json.loads(x) for x in s.log.splitlines()]
    assert any(x.get("route") == "/version" and x.get("status") == 200 for x in lines)


def test_stalled_step_turns_health_red(start, tmp_path):
    """A step that takes a minute: /health fails, and the watchdog is not fed."""
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(path)
        s = start("--step-timeout", "0.5", model="null:60000000", env={"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "1000000"})
        with s.connect() as c:
            c.sendall(post("/v1/completions", dict(prompt="x", max_tokens=1)))
            wait_health(s, 503, "stalled")
            told.setblocking(False)
            with pytest.raises(BlockingIOError):
                while True:
                    told.recv(100)
            time.sleep(1.2)  # if fed, then every half second
            with pytest.raises(BlockingIOError):
                told.recv(100)
            assert run("health", "--url", s.url).returncode == 1


def test_health_is_green_again_after_a_stall(start):
    """Steps of one and a half seconds: /health succeeds for the first third of each, then fails."""
    s = start("--step-timeout", "0.5", model="null:1500000")
    with s.connect() as c:
        c.sendall(post("/v1/completions", LONG))
        for _ in range(2):
            wait_health(s, 503, "stalled")
            wait_health(s, 200, "ready")


# ---- the end ----

@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_idle_stop(start, sig):
    s = start()
    idle = s.connect()
    idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert Reader(idle).answer()[0] == 200  # accepted: what waits in the backlog is reset
    assert s.stop(sig) == 0
    assert idle.recv(10) == b""


def signal_drain(s):
    s.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE_S
    while "draining" not in s.log:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_drain_under_load(start):
    """Accepted requests, running or waiting, are answered to the end; later ones are refused."""
    s = start("--max-num-seqs", "5", "--shutdown-timeout", "1000", model=PACED)

    def one(i):
        with s.connect() as c:
            c.sendall(post("/v1/completions", dict(prompt="x", max_tokens=150, ignore_eos=True, stream=i % 2 == 0)))
            status, headers, body = Reader(c).answer()
            text = "".join(json.loads(e)["choices"][0]["text"] for e in events(body)[:-1]) if i % 2 == 0 else \
                json.loads(body)["choices"][0]["text"]
            return status, len(text)

    late = s.connect()
    with s.connect() as holder, ThreadPoolExecutor(12) as pool:
        holder.sendall(post("/v1/completions", LONG))  # as long as it runs, so does the server
        s.wait_metric("num_requests_running", 1)
        answers = [pool.submit(one, i) for i in range(12)]
        deadline = time.monotonic() + PATIENCE_S
        while s.metric("http_streams") + s.metric("request_success_total") < 13:
            assert time.monotonic() < deadline
        signal_drain(s)
        late.sendall(post("/v1/completions", dict(prompt="x")))
        status, headers, body = Reader(late).answer()
        assert status == 503 and headers["retry-after"] and headers["connection"] == "close"
        assert "shutting down" in error_of(body)["message"]
        a = s.ask("GET", "/health")
        assert a.status_code == 503 and a.json() == {"status": "draining"}
        assert [a.result() for a in answers] == [(200, 150)] * 12
        assert s.process.poll() is None
    assert s.process.wait(PATIENCE_S) == 0


def test_drain_has_an_end(start):
    """One request runs and three wait; all get an error, in their own response format."""
    s = start("--max-num-seqs", "1", "--shutdown-timeout", "0.3", model=PACED)
    socks = [s.connect() for _ in range(4)]
    for i, c in enumerate(socks):
        c.sendall(post("/v1/completions", dict(LONG, stream=i % 2 == 1)))
        s.wait_metric("http_streams", i + 1)
    s.process.send_signal(signal.SIGTERM)
    for i, c in enumerate(socks):
        status, _, body = Reader(c).answer()
        if i % 2 == 1:
            assert status == 200 and events(body)[-1] == "[DONE]"
            assert "shutting down" in json.loads(events(body)[-2])["error"]["message"]
        else:
            assert status == 503 and "shutting down" in error_of(body)["message"]
    assert s.process.wait(PATIENCE_S) == 0


def test_drain_does_not_wait_for_a_client_that_does_not_read(start):
    s = start("--shutdown-timeout", "0.5")
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((s.host, s.port))
        # More than the socket buffers hold. (If this takes more than five seconds, the client has been disconnected by then.)
        slow.sendall(post("/v1/completions", dict(prompt="x", max_tokens=20000, ignore_eos=True, stream=True)))
        s.wait_metric("request_success_total", 1)
        assert s.stop(seconds=50) == 0  # normally a client that takes nothing is disconnected after a minute


def test_second_signal_ends_at_once(start):
    s = start("--shutdown-timeout", "1000", model=PACED)
    with s.connect() as c:
        c.sendall(post("/v1/completions", LONG))
        s.wait_metric("num_requests_running", 1)
        signal_drain(s)
        s.process.send_signal(signal.SIGTERM)
        assert s.process.wait(PATIENCE_S) == 128 + signal.SIGTERM


def test_notify(start, tmp_path):
    """systemd's protocol: READY when ready, WATCHDOG while alive, STOPPING at the end."""
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(path)
        told.settimeout(PATIENCE_S)
        s = start(env={"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "1000000"})
        assert told.recv(100) == b"READY=1"
        assert told.recv(100) == b"WATCHDOG=1"
        assert told.recv(100) == b"WATCHDOG=1"
        s.process.send_signal(signal.SIGTERM)
        while (state := told.recv(100)) == b"WATCHDOG=1":
            pass
        assert state == b"STOPPING=1"
        assert s.process.wait(PATIENCE_S) == 0


# ---- quire models ----

def test_models_that_can_be_served_are_listed():
    listed = subprocess.run([QUIRE, "models"], capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
    rows = json.loads(subprocess.run([QUIRE, "models", "--json"], capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout)
    for row in rows:
        assert row["architecture"] in listed and row["models"] in listed
        assert all(name in listed for name in row["gguf"])
    mixtral = next(row for row in rows if row["architecture"] == "MixtralForCausalLM")
    assert mixtral["experts"] and mixtral["gguf"] == ["llama"] and not mixtral["recurrent"]


def test_models_takes_no_other_words():
    run = subprocess.run([QUIRE, "models", "--yaml"], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert run.returncode == 2 and run.stderr.startswith("usage: quire models")
