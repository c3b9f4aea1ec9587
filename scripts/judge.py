"""Talks to build/tests/bench/judge_schema: schemas are compiled, texts tried."""

import json
import select
import struct
import subprocess


def instance_text(data):
    return json.dumps(data, ensure_ascii=False).encode("utf-8", "surrogatepass")


class Judge:
    """`limit`: seconds for one answer; a program that takes longer counts as crashed."""

    def __init__(self, program, model=None, limit=60):
        self.command = [program] + ([model] if model else [])
        self.limit = limit
        self.process = None
        self.crashes = 0
        self.taken = 0  # tokens or bytes of the last text
        self.masks = []  # nanoseconds
        self.compile_us = 0

    def ask(self, kind, text=b""):
        if not self.process:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
        line = b""
        try:
            self.process.stdin.write(kind.encode() + struct.pack("=I", len(text)) + text)
            while not line.endswith(b"\n"):
                if not select.select([self.process.stdout], [], [], self.limit)[0]:
                    break
                part = self.process.stdout.read(1 << 16)
                if not part:
                    break
                line += part
        except BrokenPipeError:
            pass
        if not line.endswith(b"\n"):
            self.process.kill()
            self.process.wait()
            self.process = None
            self.crashes += 1
            raise RuntimeError("the engine ended or hangs")
        return line.decode("utf-8", "replace").strip()

    def compile(self, schema):
        """None, or the error."""
        text = json.dumps(schema, ensure_ascii=False).encode("utf-8", "surrogatepass")
        answer = self.ask("S", text)
        self.compile_us = int(answer.split()[1]) if answer.startswith("ok") else 0
        return None if answer.startswith("ok") else answer

    def accepts(self, text, masks=False):
        answer = self.ask("M" if masks else "T", text).split()
        self.taken = int(answer[1])
        self.masks = [int(x) for x in answer[2:]]
        return answer[0] == "yes"

    def push(self, text):
        """Append a text; False, and nothing is appended: it is not allowed."""
        n = int(self.ask("P", text))
        if n < len(text):
            self.back(n)
        return n == len(text)

    def back(self, n):
        self.ask("B", str(n).encode())


def reordered(judge, data, tries=20000):
    """Whether a value is accepted with the members of its objects in some order."""
    left = [tries]

    def write(value, then):
        """Append a value; `then` appends what follows. False: nothing is appended."""
        if isinstance(value, dict):
            return push(b"{", lambda: members(list(value.items()), True, then))
        if isinstance(value, list):
            return push(b"[", lambda: elements(value, 0, then))
        return push(instance_text(value), then)

    def push(text, then):
        left[0] -= 1
        if left[0] < 0 or not judge.push(text):
            return False
        if then():
            return True
        judge.back(len(text))
        return False

    def members(rest, first, then):
        if not rest:
            return push(b"}", then)
        for i, (name, value) in enumerate(rest):
            text = (b"" if first else b", ") + instance_text(name) + b": "
            others = rest[:i] + rest[i + 1 :]
            if push(text, lambda: write(value, lambda: members(others, False, then))):
                return True
        return False

    def elements(value, i, then):
        if i == len(value):
            return push(b"]", then)
        return push(b", " if i else b"", lambda: write(value[i], lambda: elements(value, i + 1, then)))

    judge.ask("R")
    return write(data, lambda: judge.ask("E") == "yes")
