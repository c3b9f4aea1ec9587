"""Sections of docs/performance.md on runs of shapes: formats, layers, GPUs, processors."""

import re

from performance_cells import FP8_CACHE, cpu_model, host_steps, processor_kind, processors, rate
from performance_text import RECORDS, beside, number, para, table

DECODES = (
    ("decode 1 x 1024", 1, 1024), ("decode 8 x 1024", 8, 1024), ("decode 64 x 1024", 64, 1024),
    ("decode 256 x 1024", 256, 1024), ("decode 64 x 4096", 64, 4096),
)  # fmt: skip
# Of the same, rows that vLLM's record or the history lacks.
MORE_DECODES = ("decode 16 x 1024", "decode 32 x 1024")
TOP_P = "decode 64 x 1024, top-p"


def job_title(job):
    """`64 x 1,024` of `decode 64 x 1024`."""
    return re.sub(r"(?<= )\d{4,}", lambda m: f"{int(m[0]):,}", job.removeprefix("decode "))


def decode_row(job, cell, theirs):
    host = cell.get("decode_step_host_us") or ""
    return [job_title(job), number(rate(cell)),
            f"{cell['decode_step_ms']:.2f}" if cell.get("decode_step_ms") else "",
            number(host) if host else "", number(theirs) if theirs else "",
            beside(rate(cell), theirs) if theirs else "", cell.since()]  # fmt: skip


def records_of(cells):
    """The records that cells are from, told in one paragraph."""
    names = sorted({cell.record.name for cell in cells}, reverse=True)
    return "From " + ", ".join(f"`{RECORDS}/{name}`" for name in names) + "."


def other_gpu(cells, records, gpu):
    """A GPU of another kind: the runs of the newest record of it."""
    record = [r for r in records if gpu in r.machine and "http 64" in r.runs()][-1]
    jobs = [name for name, _, _ in DECODES] + [TOP_P]
    found = [(job, cells.find("llama-8b", "bf16", job, gpu=gpu)) for job in jobs]
    rows = [decode_row(job, cell, None) for job, cell in found if cell]
    runs = record.runs()
    https = [[n, number(runs[f"http {n}"]["output_tok_s"]),
              *(number(runs[f"http {n}"][k][p]) for k in ("ttft_ms", "itl_ms") for p in ("p50", "p99"))]
             for n in (1, 64, 256) if f"http {n}" in runs]  # fmt: skip
    jobs = [["16 prompts of 8,192 tokens, prompt tok/s", number(runs["prefill 16 x 8192"]["prefill_tok_s"])],
            ["1,000 chats at once, output tok/s", number(runs["chat-1000"]["output_tok_s"])]]  # fmt: skip
    return (
        f"## One {gpu}, the same shape\n\n" + para(record.source())
        + table(["streams x tokens", "tok/s", "ms a step", "host, µs", "", "", "commit"], rows)
        + table(["", ""], jobs)
        + table(["streams over HTTP", "tok/s", "TTFT p50, ms", "TTFT p99", "ITL p50, ms", "ITL p99"], https)
    )  # fmt: skip


# ---- other formats, other layers ----

FORMAT_JOBS = (*(name for name, _, _ in DECODES), "prefill 16 x 8192", "chat-1000")
FORMAT_COLUMNS = ("bf16", "fp8", FP8_CACHE, "int4", "mxfp4")
OTHER_JOBS = ("decode 1 x 1024", "decode 8 x 1024", "decode 64 x 1024", "decode 256 x 1024",
              "decode 64 x 4096", "prefill 16 x 8192", "chat-1000", "decode 16 x 32768",
              "256 jobs of 1024 / 1024")  # fmt: skip
OTHER_SHAPES = (
    ("Qwen3-30B-A3B", "qwen3-30b-a3b", ("bf16", "fp8", "int4")),
    ("gpt-oss-20b", "gpt-oss-20b", ("mxfp4",)), ("gpt-oss-120b", "gpt-oss-120b", ("mxfp4",)),
    ("DeepSeek-V2-Lite", "deepseek-v2-lite", ("bf16",)),
    ("Qwen3-4B", "qwen3-4b", ("bf16",)),
    ("Qwen3-4B as a hybrid, three of four layers recurrent", "qwen3-4b-hybrid",
     ("bf16", "bf16, deterministic")),
    ("LLaMA 70B on one GPU", "llama-70b", ("fp8", "int4")),
)  # fmt: skip


def quantised(cells, peers):
    """The 8B shape by format, beside vLLM's where it was run."""
    rows, used = [], []
    for job in FORMAT_JOBS:
        row = [job_title(job)]
        for form in FORMAT_COLUMNS:
            cell, theirs = cells.find("llama-8b", form, job), peers.get(("llama-8b", form, job))
            used += [cell] if cell else []
            row.append(number(rate(cell)) if cell else "")
            if form in ("fp8", FP8_CACHE):
                row += [number(theirs) if theirs else "",
                        beside(rate(cell), theirs) if cell and theirs else ""]  # fmt: skip
        rows.append(row)
    head = ["", "bf16", "fp8", "vLLM", "", "fp8, cache of fp8", "vLLM", "", "int4, groups of 128", "MXFP4"]
    return (
        "## Quantised weights, the 8B shape on one H200\n\n"
        + para("`--quantization`, tok/s; streams x tokens as above, 16 prompts of 8,192 tokens, "
               "1,000 chats. The newest record of each run. " + records_of(used))
        + table(head, rows)
    )  # fmt: skip


def other_layers(cells, peers):
    """Experts, latents, recurrent states, and what fits on one GPU."""
    rows, used = [], []
    for title, shape, forms in OTHER_SHAPES:
        for form in forms:
            found = [cells.find(shape, form, job) for job in OTHER_JOBS]
            used += [cell for cell in found if cell]
            if any(found):
                rows.append([title, form, *(number(rate(c)) if c else "" for c in found)])
            theirs = [peers.get((shape, form, job)) for job in OTHER_JOBS]
            if any(theirs):
                rows.append([title, f"{form}, vLLM", *(number(n) if n else "" for n in theirs)])
    head = ["shape", "weights", *(job_title(job) for job in OTHER_JOBS)]
    return (
        "## Experts, latents, recurrent layers, one H200\n\n"
        + para("Random weights, tok/s: `scripts/gpu-check models`. The newest record of each run. "
               + records_of(used))
        + table(head, rows)
    )  # fmt: skip


# ---- several GPUs ----


SUM_LINE = re.compile(r"(.*),\s+(\d+ KB):\s+([\d.]+) us")


def sums_over_ranks(records):
    """[what, size, ranks, µs], the newest record of each."""
    found = {}
    for record in records:
        logs = [(2, record.data.get("ranks", []))]
        logs += [(n, record.data.get(f"rank_ops, {n} ranks", [])) for n in (2, 4)]
        for n, lines in logs:
            for m in filter(None, map(SUM_LINE.match, lines)):
                what = m[1] if "columns" in m[1] else m[1] + ", 4096 columns"
                found[what, n, m[2]] = m[3]
    return [[what, size, n, us] for (what, n, size), us in found.items()]


def lost_rank(records):
    """What the newest run of tests/bench/rank_restart told."""
    return [line for r in records for line in r.data.get("ranks", []) + r.data.get("table", [])
            if isinstance(line, str) and line.startswith("2 ranks, start")][-1]  # fmt: skip


def ranks(records, cells):
    found = cells.over_ranks()
    found.sort(key=lambda x: (len(x[0]), x[0], x[1], x[3].startswith("prefill"), x[2],
                              int(x[3].split()[1])))  # fmt: skip
    rows = [[shape, form, n, job_title(job), number(rate(cell)), cell.since()]
            for shape, form, n, job, cell in found]  # fmt: skip
    return (
        "## Several GPUs\n\n"
        + para("Tensor parallelism on H200s, `scripts/gpu-check ranks`; the newest record of each "
               "run. " + records_of([x[4] for x in found]))
        + table(["shape", "weights", "ranks", "streams x tokens", "tok/s", "commit"], rows)
        + "A sum over ranks with residual and norm (`tests/bench/rank_ops`):\n\n"
        + table(["", "size", "ranks", "µs"], sums_over_ranks(records))
        + para(f"A rank that is killed (`tests/bench/rank_restart`): {lost_rank(records)}.")
    )


# ---- processors ----

CPU_ROWS = (
    ("decode, one stream, tok/s", "decode_tok_s"),
    ("prompt of 512, tok/s", "prefill_512_tok_s"),
    ("16 clients, 64 in, 64 out, tok/s", "clients_16_tok_s"),
    ("worst time to first token, s", "clients_16_worst_ttft_s"),
)
SHARE = "share_of_read_bandwidth_percent"
# Of the same decode: which share of the memory's rate it reads, and llama.cpp in its fastest way.
BESIDE_DECODE = (("of the read bandwidth", SHARE), ("beside its best way", "decode_best_way_tok_s"))


def cpu_pair(at, key):
    """Times better, ours, theirs; of times to a first token less is better."""
    better = 1 / at["ratio"] if "ttft" in key else at["ratio"]
    return f"{better:.2f}x", number(at["quire"]), number(at["llama.cpp"])


def cpu_cell(figures, key):
    if key not in figures:
        return ""
    value = figures[key][0]
    if key == SHARE:
        return f"{value['quire']:g} %"
    better, ours, theirs = cpu_pair(value, key)
    return f"{better} ({ours} / {theirs})"


def cpu_table(models):
    columns = [CPU_ROWS[0], *BESIDE_DECODE, *CPU_ROWS[1:]]
    by_size = sorted(models.items(), key=lambda m: (m[0].split()[0], "bf16" not in m[0], m[0]))
    rows = []
    for model, figures in by_size:
        part = model.startswith("Experts")  # a token reads few of them: its share says nothing
        rows.append([model, *("" if part and key == SHARE else cpu_cell(figures, key)
                              for _, key in columns)])  # fmt: skip
    return table(["model", *(title for title, _ in columns)], rows)


def cpu(records):
    text = "## CPU\n\n" + para(
        "Two threads, interleaved pairs with llama.cpp on the same weights, bf16 or a GGUF file "
        "(`tests/bench/cpu_figures`): times better (Quire / llama.cpp), the share of the memory's "
        "rate that decoding reads, and llama.cpp in its fastest way. The newest record of each "
        "figure on each kind of processor. The 0.5B and 1.2B shapes and the experts (a Qwen3-MoE "
        "shape of 0.8 GB) have random weights.")  # fmt: skip
    for kind, models in processors(records).items():
        used = [record for figures in models.values() for _, record in figures.values()]
        newest = max(used, key=lambda r: r.date)
        names = ", ".join(f"`{RECORDS}/{n}`" for n in sorted({r.name for r in used}, reverse=True))
        text += f"### {kind}\n\n" + para(f"{newest.machine}. From {names}.") + cpu_table(models)
    ready = {(cpu_model(r["model"]), processor_kind(record.machine)): [r.get("commit", record.commit), r["ms"]]
             for record in records if record.data.get("models")
             for r in record.data.get("ready_ms", [])}  # fmt: skip
    return (
        text + "What the engine's thread does in a step of so many running requests, µs "
        "(`tests/bench/engine_step`):\n\n"
        + table(["processor", "256", "1,024", "commit"], host_steps(records))
        + "From start to ready, weights in the page cache:\n\n"
        + table(["model", "processor", "commit", "ms"], [[*key, *row] for key, row in ready.items()])
    )  # fmt: skip


# What README.md shows of quantised weights and of experts: title, shape, format, job.
SHOWN = (
    ("8B in int4: one stream, tok/s", "llama-8b", "int4", "decode 1 x 1024"),
    ("8B in fp8: 64 streams at once, tok/s", "llama-8b", "fp8", "decode 64 x 1024"),
    ("8B in fp8, cache of fp8: 256 streams, tok/s", "llama-8b", FP8_CACHE, "decode 256 x 1024"),
    ("Qwen3-30B-A3B: one stream, tok/s", "qwen3-30b-a3b", "bf16", "decode 1 x 1024"),
    ("Qwen3-30B-A3B: 1,000 chats at once, output tok/s", "qwen3-30b-a3b", "bf16", "chat-1000"),
)


def shown_rows(cells, peers):
    for title, *run in SHOWN:
        cell, theirs = cells.find(*run), peers.get(tuple(run))
        if cell:
            yield [title, number(rate(cell)), f"vLLM: {number(theirs)}" if theirs else "",
                   beside(rate(cell), theirs) if theirs else ""]  # fmt: skip
