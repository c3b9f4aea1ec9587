"""Random combinations of request fields against servers on this device: weights in GGUF's blocks and in groups, and others, every
second server with the kernels of --deterministic (tests/http/combinations.py).

QUIRE_COMBINATIONS and QUIRE_COMBINATIONS_SEED set their number and seed."""
import os
import subprocess
import sys

import pytest

from conftest import DEVICE, HTTP

SERVERS = 8
RUNS = int(os.environ.get("QUIRE_COMBINATIONS", "480"))
SEED = int(os.environ.get("QUIRE_COMBINATIONS_SEED", "21"))


@pytest.mark.parametrize("seed", range(SEED, SEED + SERVERS))
def test_combinations(seed):
    command = [sys.executable, os.path.join(HTTP, "combinations.py"), "--configs", "device", "--runs", str(RUNS // SERVERS),
               "--seed", str(seed), "--batch", "0", "--most", "1"]
    run = subprocess.run(command, env=os.environ | {"QUIRE_GPU_DEVICE": DEVICE}, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
