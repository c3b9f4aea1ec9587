"""Talks to build/tests/bench/judge_schema: schemas are compiled, texts tried."""

import json
import struct
import subprocess


def instance_text(data):
    return json.dumps(data, ensure_ascii=False).encode("utf-8", "surrogatepass")


class Judge:
    def __init__(self, program, model=None):
        self.command = [program] + ([model] if model else [])
        self.process = None
        self.crashes = 0
        self.taken = 0  # tokens or bytes of the last text
        self.masks = []  # nanoseconds
        self.compile_us = 0

    def ask(self, kind, text=b""):
        if not self.process:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        self.process.stdin.write(kind.encode() + struct.pack("=I", len(text)) + text)
        self.process.stdin.flush()
        line = self.process.stdout.readline().decode("utf-8", "replace")
        if not line:
            self.process.wait()
            self.process = None
            self.crashes += 1
            raise RuntimeError("the engine ended")
        return line.strip()

    def compile(self, schema):
        """None, or the error."""
        try:
            answer = self.ask("S", json.dumps(schema, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        except RuntimeError as e:
            return str(e)
        self.compile_us = int(answer.split()[1]) if answer.startswith("ok") else 0
        return None if answer.startswith("ok") else answer

    def accepts(self, text, masks=False):
        answer = self.ask("M" if masks else "T", text).split()
        self.taken = int(answer[1])
        self.masks = [int(x) for x in answer[2:]]
        return answer[0] == "yes"
