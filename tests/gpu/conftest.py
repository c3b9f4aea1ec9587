"""Servers of the bundled model on a GPU. Needs libquire_cuda.so beside the binary; QUIRE_GPU_DEVICE=cpu runs the same on a CPU."""
import importlib.util
import os
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DEVICE = os.environ.get("QUIRE_GPU_DEVICE", "cuda")

HTTP = os.path.join(ROOT, "tests", "http")
sys.path.append(HTTP)  # alike.py
spec = importlib.util.spec_from_file_location("http_conftest", os.path.join(HTTP, "conftest.py"))
http_conftest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(http_conftest)
Server = http_conftest.Server


@pytest.fixture(scope="session")
def serve():
    """Servers by their flags, each started on first use."""
    made = {}

    def get(*flags, device=DEVICE, env=None):
        key = (device, *flags, *(env or {}).items())
        if key not in made:
            made[key] = Server("--device", device, "--swap-space", "256MiB", *flags, env=env, model=os.path.join(ROOT, "models", "demo"))
        return made[key]

    yield get
    for s in made.values():
        s.wait_idle()
        assert s.stop() == 0, s.log
