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

    def first_mask_us(self):
        """The time of the first mask behind a compiled schema."""
        answer = self.ask("M", b"{").split()
        return int(answer[2]) // 1000 if len(answer) > 2 else 0

    def push(self, text):
        """Append a text; False, and nothing is appended: it is not allowed."""
        n = int(self.ask("P", text).split()[0])
        if n < len(text):
            self.back(n)
        return n == len(text)

    def back(self, n):
        self.ask("B", str(n).encode())


def plain(value):
    """The same value with its integers as the grammar spells them, 2.0 as 2."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def ordered(schema, data):
    """A value with the members of each object in the order of the first `properties` of the
    schema that name them all, or else most of them."""
    lists = []

    def walk(x):
        if isinstance(x, dict):
            if isinstance(x.get("properties"), dict):
                lists.append(list(x["properties"]))
            x = list(x.values())
        for y in x if isinstance(x, list) else ():
            walk(y)

    def order(v):
        if isinstance(v, list):
            return [order(x) for x in v]
        if not isinstance(v, dict):
            return v
        most = max(lists, key=lambda names: len(set(names) & set(v)), default=[])
        first = [n for n in most if n in v]
        return {n: order(v[n]) for n in first + [n for n in v if n not in first]}

    walk(schema)
    return order(data)


def reordered(judge, data, tries=20000):
    """Whether a value is accepted with the members of its objects in some order and its
    integers without a fraction. Tried first is the member that leaves possible all that
    could come in its place."""

    left = [tries]

    def length(value):
        return len(instance_text(value))

    def write(value):
        """Append a value; False, and nothing is appended: it cannot come here."""
        if isinstance(value, dict):
            return members(value)
        if isinstance(value, list):
            return elements(value)
        return judge.push(instance_text(value))

    def sequence(texts):
        """Append what each step does; a step returns how many bytes, or -1."""
        done = 0
        for step in texts:
            n = step()
            if n < 0:
                judge.back(done)
                return False
            done += n
        return True

    def text(t):
        return lambda: len(t) if judge.push(t) else -1

    def elements(value):
        steps = [text(b"[")]
        for i, item in enumerate(value):
            steps += [text(b", ")] if i else []
            steps += [lambda item=item: length(item) if write(item) else -1]
        return sequence(steps + [text(b"]")])

    def possible(name, mark):
        t = mark + instance_text(name) + b": "
        if not judge.push(t):
            return False
        judge.back(len(t))
        return True

    def member(value, name, mark, rivals):
        """The bytes of a member that was appended, or -1."""
        t = mark + instance_text(name) + b": "
        if not judge.push(t):
            return -1
        if not write(value[name]):
            judge.back(len(t))
            return -1
        n = len(t) + length(value[name])
        if not all(possible(r, b", ") for r in rivals):
            judge.back(n)
            return -1
        return n

    def members(value, done=1, rest=None):
        """The rest of an object's members, behind `done` bytes of it."""
        if rest is None:
            if not judge.push(b"{"):
                return False
            rest = list(value)
        if not rest and judge.push(b"}"):
            return True
        mark = b", " if done > 1 else b""
        able = [name for name in rest if possible(name, mark)]
        for strict in (True, False):
            for name in able:
                left[0] -= 1
                rivals = [r for r in able if strict and r != name]
                n = member(value, name, mark, rivals) if left[0] > 0 else -1
                if n > 0 and members(value, done + n, [r for r in rest if r != name]):
                    return True
                judge.back(max(n, 0))
        judge.back(1 if done == 1 else 0)
        return False

    judge.ask("R")
    return write(plain(data)) and judge.ask("E") == "yes"
