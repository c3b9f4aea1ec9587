"""Records in tests/bench/records, and tables and paragraphs of docs/performance.md."""

import json
import pathlib
import re
import textwrap

RECORDS = pathlib.Path("tests/bench/records")


def number(value):
    """Three digits, or whole with commas."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def para(text):
    """A paragraph as wide as the hand-written pages; paths are never cut."""
    return textwrap.fill(text, 88, break_long_words=False, break_on_hyphens=False) + "\n\n"


def table(head, rows):
    """Columns without a value in any row are left out."""
    rows = [[str(cell) for cell in row] for row in rows]
    used = [i for i in range(len(head)) if i == 0 or any(row[i] for row in rows)]
    head, rows = [head[i] for i in used], [[row[i] for i in used] for row in rows]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n\n"


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def beside(ours, theirs, lower=False):
    return f"{theirs / ours if lower else ours / theirs:.2f}x"


class Record:
    def __init__(self, path):
        self.name, self.data = path.name, json.loads(path.read_text())
        day = re.search(r"\d{4}-\d{2}-\d{2}", path.name)
        self.date = self.data.get("date") or (day[0] if day else "")
        self.machine = self.data.get("machine") or self.data.get("device")
        if not self.machine:
            self.machine = "; ".join(self.data[k] for k in ("cpu_machine", "gpu_machine"))
        self.commit = self.data.get("commit", "")

    def __getitem__(self, key):
        return self.data[key]

    def runs(self):
        """The engine's runs by name; the oldest records hold other forms."""
        lines = self.data.get("engine", [])
        return {e["name"]: e for e in lines if isinstance(e, dict) and "name" in e}

    def source(self):
        commit = f", commit {self.commit}" if self.commit else ""
        return f"{self.machine}{commit}, {self.date} (`{RECORDS}/{self.name}`)."

    def tells(self, begin):
        """The numbers in the lines of the run's log that begin so."""
        return [
            float(re.search(r"[\d.]+", line[len(begin) :])[0])
            for line in self.data.get("table", [])
            if isinstance(line, str) and line.startswith(begin)
        ]


def load():
    return sorted((Record(p) for p in RECORDS.glob("*.json")), key=lambda r: (r.date, r.name.removesuffix(".json")))


def named(records, part):
    return [r for r in records if part in r.name][-1]


def newest_kernels(records):
    """The newest record of scripts/gpu-check with times of kernels."""
    return [r for r in records if r.data.get("kernels") and "http 64" in r.runs()][-1]


def newest_starts(records):
    """The newest with times of starts."""
    parts = ("start to ready", "checkpoint in memory to ready")
    return [r for r in records if all(r.tells(part) for part in parts)][-1]


def newest_engine(records, like):
    """The newest with its engine's runs, on a GPU of the same name as the record `like`."""
    gpu = like.machine.split(",")[0]
    runs = [r for r in records if r.machine.split(",")[0] == gpu and "http 64" in r.runs()]
    return runs[-1]
