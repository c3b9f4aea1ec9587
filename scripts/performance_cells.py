"""Figures of records, whatever their form, by what was run: the newest record of a run wins.

scripts/gpu-check and tests/bench/cpu_figures say how they write theirs; records of single
experiments have names of their own, which are read here as well. Records are given in the
order of their days."""

import dataclasses
import re

FORMATS = ("bf16", "fp8", "int4", "mxfp4")
FP8_CACHE = "fp8 + fp8 cache"
RUN = re.compile(r"(\S+) (bf16, deterministic|bf16|fp8 \+ fp8 cache|fp8|int4|mxfp4)(?:, (\d+) ranks)?: (.*)")
# scripts/gpu-check's lines: a name, then figures.
PRINTED = {"output_tok_s": r"([\d.]+) output tok/s", "decode_tok_s": r"([\d.]+) decoding",
           "decode_step_ms": r"([\d.]+) ms a step", "prefill_tok_s": r"prefill +([\d.]+) tok/s",
           "decode_step_host_us": r"decoding ([\d.]+) us"}  # fmt: skip
LINE = re.compile(r"(\S.*?)\s{2,}(.*)")
# Of an experiment's stages those whose code was kept.
KEPT_STAGES = ("routing in one launch", "since")
RANKS_RUN = re.compile(r"(\S+?)(-fp8)? tp (\d+) (\d+) x (?:912|1k)")
SHAPES = ("llama-8b", "llama-70b", "qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-120b", "deepseek-v2-lite",
          "qwen3-4b", "qwen3-4b-hybrid")  # fmt: skip
SHORT = {"moe": "qwen3-30b-a3b", "20b": "gpt-oss-20b", "120b": "gpt-oss-120b",
         "V2-Lite": "deepseek-v2-lite", "4b": "qwen3-4b", "hybrid": "qwen3-4b-hybrid"}  # fmt: skip


@dataclasses.dataclass
class Cell:
    """A run's figures, and where they are from."""

    figures: dict
    record: object
    commit: str

    def __getitem__(self, key):
        return self.figures[key]

    def get(self, key):
        return self.figures.get(key)

    def since(self):
        return f"{self.commit.split()[0]}, {self.record.date}"


def gpu_of(machine):
    found = re.search(r"\b[A-Z]\d{2,4}\b", machine)
    return found[0] if found else machine


def rate(cell):
    """Tokens a second of what the run is about: decoding, or prompts, or the whole job."""
    if " jobs of " in cell["job"]:
        return cell.get("output_tok_s")
    for key in ("decode_tok_s", "prefill_tok_s", "output_tok_s"):
        if cell.get(key) and (key != "prefill_tok_s" or cell["job"].startswith("prefill")):
            return cell[key]
    return None


def named_run(name):
    """(shape, format, ranks, job) of a run's name."""
    if run := RUN.fullmatch(name):
        return run[1], run[2], int(run[3] or 1), run[4]
    if run := RANKS_RUN.match(name):
        shape = run[1] if run[1] in SHAPES else f"llama-{run[1]}"
        return shape, "fp8" if run[2] else "bf16", int(run[3]), f"decode {run[4]} x 1024"
    return "llama-8b", "bf16", 1, name


def loose_run(name):
    """The same of a name such as `qwen3-30b-a3b 64 fp8` or `fp8 prefill`; None: not understood."""
    words = name.replace(",", "").split()
    if "--" in name or "out" in words and "4096" not in words:
        return None
    shape = next((w for w in words if w in SHAPES), None)
    shape = shape or next((SHORT[w] for w in words if w in SHORT), "llama-8b")
    form = next((w for w in words if w in FORMATS), "bf16")
    if "cache" in words or "fp8kv" in words:
        form = FP8_CACHE
    numbers = [w for w in words if w.isdigit()]
    if "chat-1000" in words:
        job = "chat-1000"
    elif "prefill" in words:
        job = "prefill 16 x 8192"
    elif "16x32k" in words:
        job = "decode 16 x 32768"
    elif "4096" in words:
        job = "decode 64 x 4096"
    elif len(numbers) == 1:
        job = f"decode {numbers[0]} x 1024"
    else:
        return None
    job += ", top-p" if "top-p" in words or "sampled" in words else ""
    return shape, "mxfp4" if shape.startswith("gpt-oss") else form, 1, job


class Cells:
    """Cells by (GPU, shape, format, ranks, job)."""

    def __init__(self, records):
        self.at = {}
        for record in records:
            self.gpu = gpu_of(record.machine)
            if re.match("h[12]00-", record.name) and "runs" not in record.data:
                self.read(record)

    def keep(self, run, figures, record, commit):
        shape, form, ranks, job = run
        if isinstance(commit, str):
            figures = {**figures, "job": job}
            self.at[self.gpu, shape, form, ranks, job] = Cell(figures, record, commit or record.name)

    def read(self, record):
        self.tables(record, record.data, record.commit)
        self.rank_log(record)
        for run in record.data.get("engine", []):
            if isinstance(run, dict) and run.get("what") == "offline" and "name" in run:
                self.keep(named_run(run["name"]), run, record, run.get("commit", record.commit))
        self.printed(record)

    def printed(self, record):
        """Lines of scripts/gpu-check's table, of runs whose own lines the record lacks."""
        told = record.runs()
        for line in record.data.get("table", []):
            if not (isinstance(line, str) and (m := LINE.fullmatch(line)) and m[1] not in told):
                continue
            if not (RUN.fullmatch(m[1]) or re.match(r"(decode|prefill|chat-)\S* ?", m[1])):
                continue
            figures = {}
            for key, form in PRINTED.items():
                if value := re.search(form, m[2]):
                    figures[key] = float(value[1])
            if figures:
                self.keep(named_run(m[1]), figures, record, record.commit)

    def tables(self, record, data, commit):
        """Experiments: a table `figures` of runs; one of rates alone, by rows, since a change."""
        if not isinstance(data, dict):
            return
        commit = data.get("commit", commit)
        for name, value in data.items():
            if name == "figures" and isinstance(value, dict):
                for run, figures in value.items():
                    if isinstance(figures, dict) and (of := loose_run(run)):
                        self.keep(of, figures, record, commit)
            elif name == "prefill_tok_s" and isinstance(value, dict):
                for run, rate_ in value.items():
                    if isinstance(rate_, (int, float)) and "prefill" in run and (of := loose_run(run)):
                        self.keep(of, {name: rate_}, record, commit)
            elif name == "decode_tok_s" and isinstance(value, dict):
                self.rates_since(record, value, commit)
            elif name != "host in steps that decode":
                self.tables(record, value, commit)

    def rates_since(self, record, models, commit):
        for model, stages in models.items():
            shape, _, form = model.partition(" ")
            if shape not in SHAPES or form not in FORMATS or not isinstance(stages, dict):
                continue
            for rates in (stages.get(stage, {}) for stage in KEPT_STAGES):
                for rows, value in rates.items():
                    if rows.isdigit():
                        value = sum(value) / len(value) if isinstance(value, list) else value
                        run = (shape, form, 1, f"decode {rows} x 1024")
                        self.keep(run, {"decode_tok_s": value}, record, commit)

    def rank_log(self, record):
        """Runs over ranks as lines of a log."""
        run = None
        for line in record.data.get("ranks", []):
            if RANKS_RUN.match(line):
                run = named_run(line)
            elif run and (value := re.match(r"decode_tok_s ([\d.]+)", line)):
                self.keep(run, {"decode_tok_s": float(value[1])}, record, record.commit)

    def find(self, shape, form, job, ranks=1, gpu="H200"):
        return self.at.get((gpu, shape, form, ranks, job))

    def over_ranks(self):
        """[(shape, format, ranks, job, cell)] of several ranks."""
        return [(*key[1:], cell) for key, cell in self.at.items() if key[3] > 1]


# ---- vLLM in other formats ----


def peer_rates(record):
    """(shape, format, job): tokens a second, the mean of the runs."""
    found = {}
    for run in record["runs"]:
        if run["what"] == "decode" and not run.get("sampling"):
            job, value = f"decode {run['batch']} x {run['prompt'] + 112}", run["tok_s"]
        elif run["what"] == "prefill" and run["requests"] == 16:
            job, value = "prefill 16 x 8192", run["prompt_tok_s"]
        elif run["what"] == "sharegpt":
            job, value = "chat-1000", run["output_tok_s"]
        else:
            continue
        found.setdefault((run["shape"], run["format"], job), []).append(value)
    return {key: sum(values) / len(values) for key, values in found.items()}


# ---- processors ----

CPU_FIGURES = {
    "decode, one stream, tokens/s over llama.cpp's": "decode_tok_s",
    "prefill of 512, tokens/s over llama.cpp's": "prefill_512_tok_s",
    "16 clients 64/64, tokens/s over llama-server's": "clients_16_tok_s",
    "16 clients 64/64, worst TTFT in ms over llama-server's": "clients_16_worst_ttft_s",
}
PAIR = re.compile(r"([\d.e+]+) \(([\d.e+]+) / ([\d.e+]+)[;)]")


def processor_kind(machine):
    kind = re.search(r"Zen \d|Xeon( with AMX)?", machine)
    return kind[0] if kind else machine


def cpu_model(name):
    """A model's name as the newest records have it, with the format of its weights."""
    for long, short in (("SmolLM2-135M", "SmolLM2"), ("LLaMA shape of 1.2 B", "1.2B"), (" shape", ""),
                        (", ", " "), ("bfloat16", "bf16")):  # fmt: skip
        name = name.replace(long, short)
    return name if re.search(r"bf16|Q\d", name) else name + " bf16"


def cpu_figures(record):
    """(model, figure, {"quire", "llama.cpp", "ratio"}) of a record of cpu_figures."""
    for model in record.data.get("models", []):
        for key, value in model.items() if isinstance(model, dict) else ():
            if isinstance(value, dict) and "quire" in value:
                yield cpu_model(model["model"]), key, value
    for name, figures in record.data.get("figures", {}).items():
        for text, value in figures.items():
            if text in CPU_FIGURES and (pair := PAIR.match(value)):
                key = CPU_FIGURES[text]
                unit = 1e3 if key.endswith("_s") and "ttft" in key else 1
                yield cpu_model(name), key, {"quire": float(pair[2]) / unit,
                                             "llama.cpp": float(pair[3]) / unit,
                                             "ratio": float(pair[1])}  # fmt: skip
    for name, value in record.data.get("decode", {}).items():
        yield cpu_model(name), "decode_tok_s", value


def host_steps(records):
    """[kind, µs of the engine's thread a step with 256 and with 1,024 running requests, commit],
    the newest of each kind of processor."""
    found = {}
    for record in records:
        kind = processor_kind(record.machine)
        if at := record.data.get("step_host_us"):
            times = [f"{at['running_256']:g}", f"{at['running_1024']:g}"]
        elif at := [v for k, v in record.data.get("host", {}).items() if "1,024 running" in k]:
            times = re.match(r"(.*?), (.*?) \(", at[0]).groups()
        else:
            continue
        found[kind] = [kind, *times, record.commit.split()[0]]
    return list(found.values())


def processors(records):
    """{kind: {model: {figure: (value, record)}}}, and the kinds in the order of their newest."""
    found = {}
    for record in records:
        if not record.name.startswith("cpu-"):
            continue
        for model, key, value in cpu_figures(record):
            kind = found.setdefault(processor_kind(record.machine), {})
            kind.setdefault(model, {})[key] = (value, record)
    return found
