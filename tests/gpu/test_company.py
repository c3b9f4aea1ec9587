"""Latents, experts and recurrent states: texts alone and in company, by the tests of tests/http, on this device."""
import os
import subprocess
import sys

import pytest

from conftest import DEVICE, HTTP


@pytest.mark.parametrize("name, tests", [
    ("test_latents.py", "company"),
    ("test_experts.py", "one_rank or one_sided"),
    ("test_hybrids.py", "company or conversation or turn"),
])
def test_texts_do_not_depend_on_their_company(name, tests):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider", os.path.join(HTTP, name), "-k", tests]
    run = subprocess.run(command, env=os.environ | {"QUIRE_GPU_DEVICE": DEVICE}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
