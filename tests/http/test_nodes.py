"""One model on several nodes: each is a process with its ranks, connected by TCP. Here all run on one machine, if possible in separate
network namespaces."""
import os
import re
import shutil
import signal
import socket
import subprocess
import time

import pytest

from conftest import PATIENCE_S, QUIRE, ROOT, clean_environment
from test_ranks import CONSTRAINED, MANY, STORY, ask, assert_same, cut, ranks_of, stat, stream, wait_for

DEMO = os.path.join(ROOT, "models", "demo")
FLAGS = ("--device", "cpu", "--threads", "2", "--kv-blocks", "256")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def cluster(port, ranks, nodes, address="127.0.0.1", stages=1):
    return (*FLAGS, *cut(ranks, stages), "--nnodes", str(nodes), "--master-addr", address, "--master-port", port,
            "--node-timeout", str(PATIENCE_S))


class Node:
    """A node other than the first."""

    def __init__(self, *flags, env=None, before=()):
        self.process = subprocess.Popen([*before, QUIRE, "serve", "--model", DEMO, *flags], stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                        env=clean_environment() | (env or {}))

    def end(self):
        """Status and log."""
        _, log = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, log.decode()

    def kill(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def node():
    made = []

    def start_node(*flags, **options):
        made.append(Node(*flags, **options))
        return made[-1]

    yield start_node
    for n in made:
        n.kill()


@pytest.fixture(scope="module")
def alone(isa):
    from conftest import Server
    s = Server(*FLAGS, model=DEMO)
    yield s
    assert s.stop() == 0, s.log


def same_answers(one, many, ranks):
    for fields in (dict(max_tokens=24), dict(max_tokens=12, n=3, temperature=0.8, seed=7),
                   dict(max_tokens=10, n=2, use_beam_search=True, best_of=4), MANY, dict(prompt=STORY["prompt"] * 20, max_tokens=5),
                   CONSTRAINED):
        assert_same(one, many, ranks, **fields)


@pytest.mark.parametrize("ranks, stages, nodes", [(2, 1, 2), (4, 1, 2), (1, 3, 3), (2, 2, 2)])
def test_answers_are_those_of_one_rank(start, alone, node, ranks, stages, nodes):
    flags = cluster(free_port(), ranks, nodes, stages=stages)
    others = [node(*flags, "--node-rank", str(i)) for i in range(1, nodes)]  # the nodes may start in any order
    s = start(*flags, model=DEMO)
    same_answers(alone, s, ranks)
    assert s.metric("rank_up") == ranks * stages
    s.wait_idle()
    assert s.stop() == 0, s.log
    assert [other.end()[0] for other in others] == [0] * (nodes - 1)


def torchrun(port, n, rank):
    return {"WORLD_SIZE": str(n), "RANK": str(rank), "LOCAL_WORLD_SIZE": str(n), "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def leader_worker_set(port, n, rank):
    return {"LWS_GROUP_SIZE": str(n), "LWS_WORKER_INDEX": str(rank), "LWS_LEADER_ADDRESS": "127.0.0.1", "MASTER_PORT": port}


@pytest.mark.parametrize("launcher, ranks, stages", [(torchrun, 2, 1), (torchrun, 2, 2), (leader_worker_set, 1, 2)])
def test_a_launcher_says_who_is_who(start, alone, node, launcher, ranks, stages):
    port, n = free_port(), ranks * stages

    def env(rank):
        return launcher(port, n, rank)
    flags = (*FLAGS, *cut(ranks, stages), "--node-timeout", str(PATIENCE_S))
    others = [node(*flags, env=env(i)) for i in range(1, n)]
    s = start(*flags, model=DEMO, env=env(0))
    assert_same(alone, s, ranks, max_tokens=9)
    s.wait_idle()
    assert s.stop() == 0, s.log
    assert [other.end()[0] for other in others] == [0] * (n - 1)


@pytest.mark.parametrize("what, ranks, stages", [("rank", 4, 1), ("node", 4, 1), ("rank", 2, 2), ("node", 2, 2)])
def test_what_is_killed_on_another_node_ends_the_service(start, node, what, ranks, stages):
    flags = cluster(free_port(), ranks, 2, stages=stages)
    other = node(*flags, "--node-rank", "1")
    s = start(*flags, model=DEMO)
    theirs = [p for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if (stat(p) or ("", 0))[1] == other.process.pid]
    assert len(theirs) == 2 and len(ranks_of(s)) == 1
    os.kill(theirs[0], signal.SIGSTOP)  # holds the step that the stream waits for
    reader = stream(s)
    s.wait_metric("num_requests_running", 1)
    os.kill(theirs[0] if what == "rank" else other.process.pid, signal.SIGKILL)
    assert b"error" in b"".join(reader.chunks())
    assert s.process.wait(PATIENCE_S) == 1
    assert re.search(r"rank [23](, on node 1,)? closed its connection", s.log), s.log
    wait_for("ranks are left", lambda: not any(stat(p) for p in theirs))
    if what == "rank":
        status, log = other.end()
        # of the killed rank, or of the other, which noticed
        assert status == 1 and ("node ended" in log or "rank failed" in log), log


def test_the_ranks_of_a_node_end_with_node_0(start, node):
    port = free_port()
    other = node(*cluster(port, 2, 2), "--node-rank", "1")
    s = start(*cluster(port, 2, 2), model=DEMO)
    s.process.kill()
    s.process.wait(PATIENCE_S)
    status, log = other.end()
    assert status == 1 and "rank 0 closed its connection" in log, log


def test_strangers_are_refused_and_change_nothing(start, node):
    port = free_port()
    s = start(*cluster(port, 2, 2), model=DEMO, wait=False)
    wait_for("nothing listens", lambda: socket.socket().connect_ex(("127.0.0.1", int(port))) == 0)
    with socket.create_connection(("127.0.0.1", int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 8)
        wait_for("a stranger is not refused", lambda: "not a rank's greeting" in s.log)
    for wrong, what in ((cluster(port, 4, 2), "tensor"), (cluster(port, 2, 2, stages=2), "pipeline")):
        status, log = node(*wrong, "--node-rank", "1").end()
        assert status == 1 and f"refused by rank 0: it has {what}_parallel_size" in log, log
    other = node(*cluster(port, 2, 2), "--node-rank", "1")
    s.wait_ready()
    ask(s, max_tokens=3)
    s.wait_idle()
    assert s.stop() == 0, s.log
    assert other.end()[0] == 0


def test_nodes_with_other_settings_both_say_why(start, node):
    flags = cluster(free_port(), 1, 2, stages=2)
    other = node(*flags, "--node-rank", "1", "--block-size", "32")
    first = node(*flags, "--port", "0")
    for status, log in (first.end(), other.end()):
        errors = [line for line in log.splitlines() if " error " in line]
        assert status == 1 and len(errors) == 1 and "rank 1 has block_size 32, rank 0 has 16" in errors[0], log


def run(*flags, env=None):
    return subprocess.run([QUIRE, "serve", "--device", "cpu", "--port", "0", "--model", DEMO, *flags], capture_output=True, text=True,
                          timeout=PATIENCE_S, env=os.environ | (env or {}))


def test_a_node_that_does_not_come_is_named():
    two = ("--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", "127.0.0.1", "--node-timeout", "1s")
    first = run(*two, "--master-port", free_port())
    assert first.returncode == 1 and "rank 1, on node 1, has not connected within node_timeout, 1 s" in first.stderr, first.stderr
    second = run(*two, "--master-port", free_port(), "--node-rank", "1")
    assert second.returncode == 1 and "nothing listens at 127.0.0.1" in second.stderr, second.stderr


def test_a_name_that_nobody_knows_is_told():
    bad = run(*cut(1, 2), "--nnodes", "2", "--master-addr", "nobody.invalid", "--node-timeout", "1s", "--node-rank", "1")
    errors = [line for line in bad.stderr.splitlines() if " error " in line]
    assert bad.returncode == 1 and "master_addr" in errors[0] and "nobody.invalid" in errors[0], bad.stderr


def test_a_port_in_use_is_told():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        bad = run("--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port)
    assert bad.returncode == 1 and f"port {port}: Address already in use" in bad.stderr, bad.stderr


@pytest.mark.parametrize("flags, env, why", [
    (["--tensor-parallel-size", "4", "--nnodes", "3"], {}, "nnodes 3 does not divide tensor_parallel_size 4"),
    (["--tensor-parallel-size", "4", "--nnodes", "2"], {}, "master_addr is missing"),
    (["--pipeline-parallel-size", "3", "--nnodes", "2"], {}, "nnodes 2 does not divide the 3 ranks"),
    (["--pipeline-parallel-size", "9", "--tensor-parallel-size", "8"], {}, "is more than 64 ranks"),
    (["--tensor-parallel-size", "4", "--node-rank", "1"], {}, "node_rank 1 must be less than nnodes 1"),
    (["--tensor-parallel-size", "2"], {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "neither MASTER_ADDR nor"),
    (["--tensor-parallel-size", "2"], {"WORLD_SIZE": "3", "RANK": "0", "MASTER_ADDR": "x"}, "nnodes 3 does not divide"),
])
def test_what_cannot_be_is_one_line(flags, env, why):
    bad = run(*flags, env=env)
    assert bad.returncode == 2 and why in bad.stderr and len(bad.stderr.splitlines()) == 1, bad.stderr


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True)


@pytest.fixture
def namespaces():
    """Two network namespaces in place of two machines: their names, and the address of the first."""
    if not shutil.which("ip") or os.geteuid() != 0:
        pytest.skip("network namespaces need root and ip")
    a, b = (f"quire-{os.getpid()}-{x}" for x in "ab")
    try:
        if ip("netns", "add", a).returncode or ip("netns", "add", b).returncode or \
                ip("link", "add", "quire0", "netns", a, "type", "veth", "peer", "name", "quire0", "netns", b).returncode:
            pytest.skip("network namespaces are not allowed here")
        for name, address in ((a, "10.77.0.1/24"), (b, "10.77.0.2/24")):
            for words in (["addr", "add", address, "dev", "quire0"], ["link", "set", "quire0", "up"], ["link", "set", "lo", "up"]):
                assert ip("-n", name, *words).returncode == 0
        yield a, b, "10.77.0.1"
    finally:
        ip("netns", "del", a)
        ip("netns", "del", b)


@pytest.mark.parametrize("ranks, stages", [(2, 1), (1, 2)])
def test_nodes_in_networks_of_their_own(namespaces, node, ranks, stages):
    a, b, address = namespaces
    flags = cluster(free_port(), ranks, 2, address, stages)
    first = node(*flags, "--host", "0.0.0.0", "--port", "18181", before=("ip", "netns", "exec", a))
    second = node(*flags, "--node-rank", "1", before=("ip", "netns", "exec", b))
    fetch = ["ip", "netns", "exec", b, "curl", "-s", f"http://{address}:18181/v1/completions", "-H", "Content-Type: application/json",
             "-d", '{"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0}']
    end = time.monotonic() + PATIENCE_S
    answer = ""
    while '"text"' not in answer:
        assert time.monotonic() < end and first.process.poll() is None and second.process.poll() is None
        answer = subprocess.run(fetch, capture_output=True, text=True).stdout
        time.sleep(0.05)
    first.process.send_signal(signal.SIGTERM)
    assert first.end()[0] == 0 and second.end()[0] == 0
