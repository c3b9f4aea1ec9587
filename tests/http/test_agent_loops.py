"""Agents at work, with tools over several turns: those of the SDKs, and Codex and Claude Code
themselves where their packages are installed. Which function is called is up to the test, as the
bundled model cannot choose; the arguments are the model's, held to the schema."""

import asyncio
import json
import os
import re
import subprocess
import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

import pytest

from chat_models import HERMES, model_with
from conftest import ROOT, serving

PAINT = {
    "type": "function",
    "function": {
        "name": "paint",
        "description": "Paint it.",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "green"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}
# The longest a program may take, however slow the machine: its prompts have 20,000 tokens.
PROGRAM_S = 1200
TASK = "Once upon a time there was a little dog. Paint it."


def serving_length(tmp_path_factory, length):
    model = model_with(
        tmp_path_factory.mktemp("loops") / "demo", HERMES, max_position_embeddings=length
    )
    flags = ("--served-model-name", "demo", "--kv-cache-memory", "1GiB", "--device", "cpu")
    return serving(*flags, model=model)


@pytest.fixture(scope="module")
def painter(tmp_path_factory):
    with serving_length(tmp_path_factory, 4096) as s:
        yield s


# ---- SDKs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["responses", "chat"])
@pytest.mark.parametrize("streams", [False, True])
def test_agents_sdk_in_turns(painter, api, streams):
    """The first call fails, its error goes back to the model, and the loop goes on."""
    agents = pytest.importorskip("agents", reason="openai-agents is not installed")
    import openai

    agents.set_tracing_disabled(True)
    painted = []

    @agents.function_tool
    def paint(colour: Literal["red", "green"], coats: Literal[1, 2]) -> str:
        """Paint it."""
        painted.append((colour, coats))
        if len(painted) == 1:
            raise RuntimeError("the tin is empty")
        return f"done in {colour}"

    def after(context, results):
        return agents.ToolsToFinalOutputResult(
            is_final_output=len(painted) == 4, final_output=str(results[-1].output)
        )

    client = openai.AsyncOpenAI(base_url=painter.url + "/v1", api_key="none", max_retries=0)
    kind = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
    agent = agents.Agent(
        name="painter",
        instructions="You paint.",
        model=kind("demo", client),
        tools=[paint],
        tool_use_behavior=after,
        reset_tool_choice=False,
        model_settings=agents.ModelSettings(
            temperature=0, tool_choice="required", max_tokens=600, parallel_tool_calls=False
        ),
    )

    async def run():
        if not streams:
            return await agents.Runner.run(agent, TASK, max_turns=6)
        done = agents.Runner.run_streamed(agent, TASK, max_turns=6)
        kinds = [e.type async for e in done.stream_events()]
        assert "raw_response_event" in kinds and "run_item_stream_event" in kinds
        return done

    done = asyncio.run(run())
    assert len(painted) == 4 and done.final_output == "done in " + painted[-1][0]
    outputs = [i["output"] for i in done.to_input_list() if i.get("type") == "function_call_output"]
    assert len(outputs) == 4 and outputs[0].startswith("An error occurred while running the tool")
    assert outputs[1:] == [f"done in {colour}" for colour, _ in painted[1:]]


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_langchain_in_turns(painter, api):
    """Calls that come in pieces, tools that fail, and a last answer without a call."""
    name = "langchain_anthropic" if api == "messages" else "langchain_openai"
    package = pytest.importorskip(name, reason=name + " is not installed")
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage

    common = {"model": "demo", "api_key": "none", "max_retries": 0, "max_tokens": 200}
    if api == "messages":
        llm = package.ChatAnthropic(base_url=painter.url, **common)
    else:
        llm = package.ChatOpenAI(
            base_url=painter.url + "/v1",
            use_responses_api=api == "responses",
            stream_usage=True,
            **common,
        )
    messages = [SystemMessage("You paint."), HumanMessage(TASK)]
    for turn in range(4):
        bound = llm.bind_tools([PAINT], tool_choice="paint", parallel_tool_calls=False)
        pieces = list(bound.stream(messages))
        whole = pieces[0]
        for piece in pieces[1:]:
            whole += piece
        [call] = whole.tool_calls
        assert call["name"] == "paint" and call["id"] and not whole.invalid_tool_calls
        assert whole.usage_metadata["output_tokens"] > 0
        failed = turn == 1
        result = "the tin is empty" if failed else "done in " + call["args"]["colour"]
        status = "error" if failed else "success"
        messages += [whole, ToolMessage(result, tool_call_id=call["id"], status=status)]
    last = llm.invoke(messages)
    assert last.content and not last.tool_calls


# ---- programs --------------------------------------------------------------------------------


class Chooser(BaseHTTPRequestHandler):
    """Stands in front of the server. A request with tools must call the next function of
    `wanted`; when none is left, it must not call any, and a response
    ends with its first sentence."""

    protocol_version = "HTTP/1.1"
    target = wanted = answers = asked = None

    def log_message(self, *a):
        pass

    def choose(self, body):
        sent = json.loads(body)
        messages = self.path.startswith("/v1/messages")
        if "tools" in sent and "count_tokens" not in self.path:
            names = {t.get("name") for t in sent["tools"]}
            name = self.wanted.pop(0) if self.wanted and self.wanted[0] in names else None
            kind = "tool" if messages else "function"
            none = {"type": "none"} if messages else "none"
            sent["tool_choice"] = {"type": kind, "name": name} if name else none
            if not name and not messages:  # the bundled model's stories are long
                sent["stop"] = "."
        self.asked.append(sent)
        return json.dumps(sent).encode()

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        forwarded = HTTPConnection(*self.target, timeout=PROGRAM_S)
        left_out = ("host", "content-length", "connection", "accept-encoding")
        headers = {k: v for k, v in self.headers.items() if k.lower() not in left_out}
        forwarded.request(self.command, self.path, self.choose(body) if body else None, headers)
        answer = forwarded.getresponse()
        self.answers.append((self.path, answer.status))
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.getheader("Content-Type") or "text/plain")
        self.send_header("Connection", "close")
        self.end_headers()
        while piece := answer.read1(1 << 16):
            self.wfile.write(piece)
            self.wfile.flush()
        self.close_connection = True

    do_POST = do_HEAD = do_GET


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    """A server with room for a coding agent's first prompt."""
    with serving_length(tmp_path_factory, 65536) as s:
        yield s


@pytest.fixture
def chosen(roomy):
    """The address of a Chooser, and its class."""
    members = {"target": (roomy.host, roomy.port), "wanted": [], "answers": [], "asked": []}
    chooser = type("Chosen", (Chooser,), members)
    front = ThreadingHTTPServer(("127.0.0.1", 0), chooser)
    thread = threading.Thread(target=front.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{front.server_port}", chooser
    front.shutdown()
    thread.join()
    front.server_close()


def run_program(program, home, workspace, **env):
    """Nothing of the environment reaches the program but what is given; what it would ask of
    other servers fails at once."""
    env |= {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
    env |= {"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    env |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return subprocess.run(
        program,
        cwd=workspace,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )


def settings_of(name, url):
    """A file of deploy/agents, filled in as docs/agents.md says."""
    with open(os.path.join(ROOT, "deploy", "agents", name)) as f:
        text = f.read()
    for old, new in (("MODEL", "demo"), ("http://127.0.0.1:8000", url), ("32768", "65536")):
        assert old in text or old == "32768", old
        text = re.sub(rf"\b{old}\b" if old == "MODEL" else re.escape(old), new, text)
    return text


def test_codex(chosen, tmp_path):
    package = pytest.importorskip("codex_cli_bin", reason="openai-codex-cli-bin is not installed")
    url, front = chosen
    front.wanted += ["get_goal", "get_goal"]
    home, workspace = tmp_path / "home", tmp_path / "work"
    (home / ".codex").mkdir(parents=True)
    (home / ".codex" / "config.toml").write_text(settings_of("codex.toml", url))
    workspace.mkdir()
    program = [package.bundled_codex_path(), "exec", "--strict-config", "--json"]
    flags = ["--sandbox", "read-only", "--skip-git-repo-check", TASK]
    done = run_program(program + flags, home, workspace, QUIRE_API_KEY="none")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {status for _, status in front.answers} == {200}, front.answers
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [e["type"] for e in events][-1] == "turn.completed"
    turns = [sent for sent in front.asked if "tools" in sent]
    assert len(turns) == 3 and not front.wanted
    kinds = [item.get("type") for item in turns[-1]["input"]]
    assert kinds.count("function_call") == kinds.count("function_call_output") == 2


def test_codex_reads_the_list_of_models(server, tmp_path):
    """It asks where its provider has a command for keys. The null model has no template, so that
    is as far as it comes."""
    package = pytest.importorskip("codex_cli_bin", reason="openai-codex-cli-bin is not installed")
    home, workspace = tmp_path / "home", tmp_path / "work"
    (home / ".codex").mkdir(parents=True)
    settings = settings_of("codex.toml", server.url).replace(
        'env_key = "QUIRE_API_KEY"', 'auth = { command = "/bin/echo", args = ["none"] }'
    )
    (home / ".codex" / "config.toml").write_text(settings.replace('"demo"', '"null"'))
    workspace.mkdir()
    program = [package.bundled_codex_path(), "exec", "--strict-config", "--skip-git-repo-check"]
    done = run_program([*program, "--sandbox", "read-only", TASK], home, workspace)
    assert "chat is not possible" in done.stderr, done.stdout + done.stderr
    [model] = json.loads((home / ".codex" / "models_cache.json").read_text())["models"]
    served = server.ask("GET", "/v1/models").json()["data"][0]
    assert model["slug"] == served["id"] == "null"
    assert model["context_window"] == served["max_model_len"]


def test_claude_code(chosen, tmp_path):
    package = pytest.importorskip("claude_agent_sdk", reason="claude-agent-sdk is not installed")
    program = os.path.join(os.path.dirname(package.__file__), "_bundled", "claude")
    if not os.path.exists(program):
        pytest.skip("claude-agent-sdk comes without the program here")
    url, front = chosen
    front.wanted += ["Glob", "Glob"]
    home, workspace = tmp_path / "home", tmp_path / "work"
    (home / ".claude").mkdir(parents=True)
    (home / ".claude" / "settings.json").write_text(settings_of("claude-code.json", url))
    workspace.mkdir()
    flags = ["-p", TASK, "--output-format", "stream-json", "--verbose", "--tools", "Read,Glob,Grep"]
    done = run_program([program, *flags], home, workspace)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {status for _, status in front.answers} == {200}, front.answers
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert events[-1]["type"] == "result" and not events[-1]["is_error"], events[-1]
    turns = [sent for sent in front.asked if "tools" in sent]
    assert len(turns) >= 3 and not front.wanted
