"""A real server for each test module, on a free port, with the null model: its answers are synthetic, everything else is real."""
import contextlib
import functools
import os
import re
import signal
import socket
import ssl
import subprocess
import tempfile
import time

import httpx
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
QUIRE = os.environ.get("QUIRE_BIN", os.path.join(ROOT, "build", "quire"))

# The longest wait for an event that must occur; only reached if it never does, however slow the machine.
PATIENCE_S = 120

# At least ten milliseconds per step. `LONG` of test_connections takes five minutes with it, so a request that runs when a
# test looks still runs when the test acts, on any machine. (Without the delay it would take less than a second.)
PACED = "null:10000"

# A client of httpx, which the SDKs have too and a single request makes anew, reads the certificates of all
# authorities. That takes longer than most requests, so all clients have the same.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# Runs what repeats, with other models or seeds, what the rest shows of each kind.
WHOLE = os.environ.get("QUIRE_TEST_WHOLE", "") not in ("", "0")


def clean_environment():
    """This process's environment without Quire's settings; variables that select the hardware stay."""
    machine = ("QUIRE_CPU_ISA", "QUIRE_CPU_BF16", "QUIRE_CPU_WAYS", "QUIRE_CUDA_SMEM_LIMIT")
    return {k: v for k, v in os.environ.items() if not k.startswith("QUIRE_") or k in machine}


@functools.cache
def instruction_sets():
    """The best instruction set that this machine has and the most common one, or the one that
    is selected. The unit tests of models and kernels go through all of them."""
    if os.environ.get("QUIRE_CPU_ISA"):
        return [os.environ["QUIRE_CPU_ISA"]]

    def taken(isa):
        """The start fails just after the backend is open, because no machine has memory for this pool."""
        command = [QUIRE, "serve", "--device", "cpu", "--port", "0", "--kv-blocks", "2000000000",
                   "--model", os.path.join(ROOT, "models", "demo")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S,
                              env=clean_environment() | {"QUIRE_CPU_ISA": isa})
        refused = "cannot run" in done.stderr
        assert done.returncode == 1 and (refused or "are free" in done.stderr), done.stderr
        return not refused
    known = [isa for isa in ("amx", "avx512bf16", "avx512", "avx2", "neon") if taken(isa)] or ["plain"]
    return known[:1] + [isa for isa in known[1:] if isa == "avx2"]


def pytest_collection_modifyitems(config, items):
    """Without QUIRE_TEST_WHOLE a test runs with one of several parameters that are alike to it: its mark
    `alike("name", [...])` names the values of a fixture or parameter that are left out."""
    def spared(item):
        return any(item.callspec.params.get(mark.args[0]) in mark.args[1] for mark in item.iter_markers("alike"))
    left_out = [] if WHOLE else [item for item in items if spared(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_configure(config):
    config.addinivalue_line("markers", "alike(name, values): left out without QUIRE_TEST_WHOLE")


def pytest_generate_tests(metafunc):
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", instruction_sets(), indirect=True, scope="module")


@pytest.fixture(scope="module")
def isa(request):
    """Run a test that compares generated texts once for each instruction set; servers started
    in it use that set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CPU_ISA", request.param)
        yield request.param


class Server:
    """`quire serve` with some flags. `url`, `host`, `port` are where it listens."""

    def __init__(self, *flags, model="null", env=None, wait=True):
        environment = clean_environment() | (env or {})
        self.key_file = flags[flags.index("--api-key-file") + 1] if "--api-key-file" in flags else None
        self.log_file = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [QUIRE, "serve", "--model", model, "--port", "0", *flags],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.log_file, env=environment)
        if not wait:
            return
        try:
            self.wait_ready()
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    @property
    def log(self):
        size = os.fstat(self.log_file.fileno()).st_size
        return os.pread(self.log_file.fileno(), size, 0).decode()

    def wait_ready(self, seconds=PATIENCE_S):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = re.search(r""" ready url=(\S+)|"ready","url":"([^"]+)""", self.log)
            if found:
                self.url = found[1] or found[2]
                if self.url.startswith("http"):
                    self.host, port = re.fullmatch(r"https?://\[?([^\]]*?)\]?:(\d+)", self.url).groups()
                    self.port = int(port)
                return
            assert self.process.poll() is None, "the server ended: " + self.log
            time.sleep(0.01)
        raise AssertionError("the server is not ready: " + self.log)

    def connect(self, timeout=PATIENCE_S):
        return socket.create_connection((self.host, self.port), timeout=timeout)

    def ask(self, method, path, **fields):
        return httpx.request(method, self.url + path, timeout=PATIENCE_S, **fields)

    def get(self, path):
        key = re.search(r"key=(\S+)", open(self.key_file).read())[1] if self.key_file else ""
        return self.ask("GET", path, headers={"Authorization": "Bearer " + key} if key else {}).raise_for_status().text

    def metric(self, name, **labels):
        """The value of a metric, named without its prefix; the sum over labels that are not given."""
        total = 0.0
        for line in self.get("/metrics").splitlines():
            found = re.fullmatch(r"quire_(\w+)(?:\{(.*)\})? (\S+)", line)
            if found and found[1] == name and all(f'{k}="{v}"' in (found[2] or "") for k, v in labels.items()):
                total += float(found[3])
        return total

    def wait_metric(self, name, value, seconds=PATIENCE_S, **labels):
        end = time.monotonic() + seconds
        while self.metric(name, **labels) != value:
            assert time.monotonic() < end, f"{name} is {self.metric(name, **labels)}, not {value}"
            time.sleep(0.02)

    def wait_idle(self):
        """No request is left: all streams, sequences and blocks are released."""
        for name in ("http_streams", "num_requests_running", "num_requests_waiting", "num_requests_swapped"):
            self.wait_metric(name, 0)
        self.wait_metric("kv_cache_usage_perc", 0)

    def stop(self, sig=signal.SIGTERM, seconds=PATIENCE_S):
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        return status


@contextlib.contextmanager
def serving(*flags, **options):
    """A server for several tests; in the end it must be idle and stop cleanly."""
    s = Server(*flags, **options)
    try:
        yield s
        s.wait_idle()
        assert s.stop() == 0, s.log
    finally:
        s.process.kill()
        s.process.wait()


@pytest.fixture(scope="module")
def server():
    with serving() as s:
        yield s


@pytest.fixture(scope="module")
def delayed():
    with serving(model=PACED) as s:
        yield s


@pytest.fixture
def start():
    """Start servers with given flags; they are stopped at the end."""
    made = []

    def begin(*flags, **options):
        s = Server(*flags, **options)
        made.append(s)
        return s

    yield begin
    for s in made:
        s.process.kill()
        s.process.wait()
