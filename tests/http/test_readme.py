"""The examples of README.md, extracted and run: the curl and its answer, the SDK's lines, the commands that measure and
simulate. (scripts/run and the packages: tests/deploy.)"""
import json
import os
import re
import subprocess
import sys

import pytest

from alike import NEAR
from conftest import QUIRE, ROOT, serving

README = open(os.path.join(ROOT, "README.md")).read()
URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def demo(isa):
    with serving("--device", "cpu", model=os.path.join(ROOT, "models", "demo")) as server:
        yield server


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |^# )", README, re.M | re.S)[1]


def run(command, folder):
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=600, cwd=folder)
    assert done.returncode == 0, command + "\n" + done.stdout + done.stderr
    return done.stdout


def words(text):
    return " ".join(text.split())


def test_the_curl_gives_the_answer_that_is_shown(demo, tmp_path):
    block = re.search(r"<!-- curl:begin -->\n(.*?)\n\n", README, re.S)[1]
    shell, _, answer = block.partition("\n    {")
    command = shell.strip().removeprefix("$ ")
    assert URL in command
    got = json.loads(run(command.replace(URL, demo.url), tmp_path))
    # Lines are wrapped between words, even inside strings.
    shown = json.loads(words("{" + answer))
    assert set(got) == set(shown) and set(got["choices"][0]) == set(shown["choices"][0])
    prompt = json.loads(re.search(r"-d '(.*)'", command)[1])["prompt"]
    text = shown["choices"][0]["text"]
    if words(got["choices"][0]["text"]) == words(text):
        assert got["usage"] == shown["usage"]
    assert got["usage"]["prompt_tokens"] == shown["usage"]["prompt_tokens"]
    # Processors round differently: every token shown is the likeliest one, or nearly.
    again = dict(prompt=prompt + text, max_tokens=0, echo=True, logprobs=1)
    forced = demo.ask("POST", "/v1/completions", json=again).json()
    told = forced["choices"][0]["logprobs"]
    assert len(told["tokens"]) == shown["usage"]["total_tokens"]
    for i in range(shown["usage"]["prompt_tokens"], len(told["tokens"])):
        best = max(told["top_logprobs"][i].values())
        assert told["token_logprobs"][i] > best - NEAR, told["tokens"][i]


def test_the_sdk_lines_print_text(demo, tmp_path):
    code = re.search(r"```python\n(.*?)```", section("Use"), re.S)[1]
    assert URL in code
    done = subprocess.run([sys.executable, "-c", code.replace(URL, demo.url)], capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 10


def commands():
    """The indented lines of Measure and Simulate, without comments and commands that need a file or take long."""
    lines = re.findall(r"^    (\S.*)$", section("Measure") + section("Simulate"), re.M)
    lines = [line.split("  #")[0].strip() for line in lines]
    return [line for line in lines if "RECORDS" not in line and "paper-figures" not in line]


def test_there_are_commands_to_run():
    assert len(commands()) >= 5


@pytest.mark.parametrize("command", commands())
def test_a_command_runs(command, server, tmp_path):
    """Run a command as from the root of the repository, with the program under test and a scratch directory for output. The server
    has the null model, because hundreds of answers are needed."""
    for name in ("scripts", "models"):
        (tmp_path / name).symlink_to(os.path.join(ROOT, name))
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "quire").symlink_to(QUIRE)
    assert len(run(command.replace(URL, server.url), tmp_path).splitlines()) > 3
