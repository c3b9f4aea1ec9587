"""docs/performance.md and the table of README.md, from the records in tests/bench/records."""

import json
import re

from performance_cells import Cells, peer_rates, processors
from performance_shapes import (CPU_ROWS, DECODES, MORE_DECODES, TOP_P, cpu, cpu_pair, decode_row,
                                other_gpu, other_layers, quantised, ranks, shown_rows)  # fmt: skip
from performance_text import (RECORDS, beside, load, mean, named, newest_engine, newest_kernels,
                              newest_starts, number, para, table)  # fmt: skip

INTRO = """# Performance

Printed by `make docs` from the records in `tests/bench/records`; do not edit it here. Each
table names the record, the machine, the commit and the day. To measure again, run the
command that a section names on your machine. Where two programs stand side by side, the
last column says how many times better Quire is: more of a rate, or less of a time.

"""

KERNEL = re.compile(
    r"(?P<what>.*\S)\s+(?P<us>[\d.]+) us"
    r"(?:,\s+[\d.]+ MB,\s+(?P<tb>[\d.]+) TB/s \(\s*(?P<tb_part>\d+) %\))?"
    r"(?:,\s+[\d.]+ GFLOP,\s+(?P<tf>[\d.]+) TFLOP/s \(\s*(?P<tf_part>\d+) %\))?$"
)
KERNEL_TABLES = (
    ("Decode attention", "decode"), ("Prefill attention", "prefill attention"),
    ("Both in one step", "attention,"), ("Matrix products", ("product", "gated product")),
    ("Sampling", "sampling"), ("Norms, rotation, embedding", ("residual", "rope", "embedding")),
)  # fmt: skip


# ---- vLLM's runs ----


def peer_key(run):
    """What was run: runs with the same key measure the same."""
    return [run["what"], *(run.get(k) for k in ("batch", "prompt", "sampling"))] + (
        [run["name"]] if run["what"] == "server" else [])


def newest_peer(records):
    """vLLM's record, with what was measured in the same minutes as Quire in place of older runs."""
    peer = named(records, "vllm")
    both = [r for r in records if isinstance(r.data.get("peer"), list)]
    if both:
        newer = [r for r in both[-1]["peer"] if r["what"] in ("decode", "server")]
        keys = [peer_key(r) for r in newer]
        peer.data["runs"] = newer + [r for r in peer["runs"] if peer_key(r) not in keys]
        peer.data["newer"] = " Decode up to 256 x 1,024 and HTTP: " + both[-1].source()
    return peer


def peer_runs(peer, **wanted):
    return [r for r in peer["runs"] if all(r.get(k) == v for k, v in wanted.items())]


def peer_decode(peer, streams, context, sampling=None):
    wanted = {"what": "decode", "batch": streams, "prompt": context - 112}
    runs = peer_runs(peer, **wanted, sampling=sampling or {})
    stage = runs[0].get("stage")
    return mean(r["tok_s"] for r in runs if r.get("stage") == stage)


def peer_http(peer, streams):
    name = "single" if streams == 1 else f"closed{streams}"
    runs = peer_runs(peer, what="server", name=name)
    at = {
        k: {p: mean(r[k][p] for r in runs) for p in ("50", "99")} for k in ("ttft_ms", "itl_ms")
    }
    return mean(r["output_tok_s"] for r in runs), at


# ---- one GPU ----


def decode_rows(cells, peer):
    theirs = {name: peer_decode(peer, streams, context) for name, streams, context in DECODES}
    theirs[TOP_P] = peer_decode(peer, 64, 1024, {"temperature": 0.8, "top_p": 0.95})
    jobs = sorted([*theirs, *MORE_DECODES], key=lambda job: (job == TOP_P, "4096" in job,
                                                            int(job.split()[1])))  # fmt: skip
    found = [(job, cells.find("llama-8b", "bf16", job)) for job in jobs]
    return [decode_row(job, cell, theirs.get(job)) for job, cell in found if cell]


def job_rows(full, peer):
    runs = full.runs()
    one = peer_runs(peer, what="prefill", name="one")[0]["wall_ms_median"]
    many = peer_runs(peer, what="prefill", name="sixteen")[0]["prompt_tok_s"]
    chats = mean(r["output_tok_s"] for r in peer_runs(peer, what="sharegpt", stage="default"))
    samples = mean(r["output_tok_s"] for r in peer_runs(peer, what="n8", stage="default"))
    beams = mean(r["ms_per_step"] for r in peer_runs(peer, what="beam"))
    prefill = runs["prefill 1 x 8192"]["prefill_s"] * 1e3
    rate = runs["prefill 16 x 8192"]["prefill_tok_s"]
    chat = runs["chat-1000"]["output_tok_s"]
    n8 = runs["128 x n=8, 512 / 128"]["output_tok_s"]
    beam = runs["32 beams of 4, 128 / 64"]["decode_step_ms"]
    return [
        ["one prompt of 8,192 tokens, ms", number(prefill), number(one),
         beside(prefill, one, True)],
        ["16 prompts of 8,192 tokens, prompt tok/s", number(rate), number(many),
         beside(rate, many)],
        ["1,000 chats at once, output tok/s", number(chat), number(chats), beside(chat, chats)],
        ["128 requests of 8 samples, 512 / 128, output tok/s", number(n8), number(samples),
         beside(n8, samples)],
        ["32 beam searches of width 4, 128 / 64, ms a step", number(beam), number(beams),
         beside(beam, beams, True)],
    ]  # fmt: skip


def http_rows(full, peer):
    rows = []
    for streams in (1, 64, 256):
        run = full.runs()[f"http {streams}"]
        rate, at = peer_http(peer, streams)
        ours = [number(run[k][p]) for k in ("ttft_ms", "itl_ms") for p in ("p50", "p99")]
        theirs = [number(at[k][p]) for k in ("ttft_ms", "itl_ms") for p in ("50", "99")]
        rows.append([streams, "Quire", number(run["output_tok_s"]), *ours])
        rows.append([streams, "vLLM", number(rate), *theirs])
    return rows


def ready_range(full):
    # The log holds a start with every product timed, then one with what it kept.
    times = full.tells("start to ready")
    return f"{min(times) / 1e3:.1f} to {max(times) / 1e3:.1f} s"


def start_rows(full, peer):
    cold = [r["ready_s"] for r in peer["runs"] if "ready_s" in r]
    loaded = full.tells("checkpoint in memory to ready")
    return [
        ["start to ready, random weights", ready_range(full),
         f"{min(cold):.0f} to {max(cold):.0f} s"],
        ["start to ready, checkpoint of 16 GB in the page cache",
         f"{min(loaded) / 1e3:.1f} to {max(loaded) / 1e3:.1f} s", ""],
    ]  # fmt: skip


def one_gpu(full, started, peer, cells):
    return (
        "## One GPU, the shape of Llama-3.1-8B, bf16\n\n"
        + para("Random weights, `scripts/gpu-check`. Quire: " + full.source())
        + para(f"{peer['peer']}: " + peer.source() + peer.data.get("newer", "")) +
        "### Decode\n\nMean of the steps in which the whole batch decodes; host: time of the "
        "engine's thread in such a step. top-p: temperature 0.8, top-p 0.95.\n\n"
        + table(["streams x tokens", "Quire, tok/s", "ms a step", "host, µs", "vLLM, tok/s", "",
                 "commit"], decode_rows(cells, peer))
        + "### Whole jobs\n\n" + table(["", "Quire", "vLLM", ""], job_rows(full, peer))
        + "### Over HTTP\n\nPrompts of 512 tokens, answers of 128, a closed loop.\n\n"
        + table(["streams", "", "tok/s", "TTFT p50, ms", "TTFT p99", "ITL p50, ms", "ITL p99"],
                http_rows(full, peer))
        + "### Start\n\n" + para(started.source())
        + table(["", "Quire", "vLLM"], start_rows(started, peer))
    )  # fmt: skip


def history(records):
    head = ["record", *(n.removeprefix("decode ") for n, _, _ in DECODES), "16 x 8192 prefill",
            "chats", "HTTP 64", "HTTP 256"]  # fmt: skip
    rows = []
    for r in records:
        runs = r.runs()
        if "http 64" not in runs and "decode 1 x 1024" not in runs:
            continue

        def cell(name, field, runs=runs):
            return number(runs[name][field]) if field in runs.get(name, {}) else ""

        other = "" if "H200" in r.machine else f", {r.machine.split(',')[0]}"
        rows.append(
            [f"{r.commit}, {r.date}{other}", *(cell(n, "decode_tok_s") for n, _, _ in DECODES),
             cell("prefill 16 x 8192", "prefill_tok_s"), cell("chat-1000", "output_tok_s"),
             cell("http 64", "output_tok_s"), cell("http 256", "output_tok_s")]
        )  # fmt: skip
    text = (
        "All in tok/s, on one H200 unless another GPU is named; records of one day stand in the "
        "order of their names."
    )
    return "### The same runs by commit\n\n" + para(text) + table(head, rows)


# ---- kernels ----


def kernel_rows(lines, begins):
    rows = []
    for line in lines:
        m = KERNEL.match(line) if line.startswith(begins) else None
        if m:
            share = [f"{m['tb']} ({m['tb_part']} %)" if m["tb"] else "",
                     f"{m['tf']} ({m['tf_part']} %)" if m["tf"] else ""]  # fmt: skip
            rows.append([m["what"], m["us"], *share])
    return rows


FP8_LINES = "kernels, cache of fp8"


def over_fp8(records):
    """Attention over a cache of fp8, of the newest record that has it."""
    found = [r for r in records if r.data.get(FP8_LINES)]
    if not found:
        return ""
    rows = kernel_rows(found[-1][FP8_LINES], ("decode", "prefill", "attention"))
    return (
        "### Attention over a cache of fp8\n\n"
        + para("`quire bench kernels decode prefill fp8`: " + found[-1].source())
        + table(["", "µs", "TB/s", "TFLOP/s"], rows)
    )


def latent_layers(record):
    """Lines of tests/bench/latent; the oldest record has them beside what else was tried."""
    at = record.data.get("latents") or record.data.get("latent")
    return at.get("layers") if isinstance(at, dict) else at


def latents(records):
    found = [r for r in records if latent_layers(r)]
    if not found:
        return ""
    rows = [[f"{at['seqs']} x {at['context']:,}" + (f", {at['query']:,} new" if at["query"] > 1 else ""),
             at["heads"], at["us"], "" if at["query"] > 1 else at["tb_s"], at["tflops"]]
            for at in latent_layers(found[-1])]  # fmt: skip
    return (
        "### Attention over latents\n\n"
        + para("DeepSeek's latents of 576 values, bf16, a layer with its products by head, as if "
               "attention alone took all of the time (`tests/bench/latent`): "
               + found[-1].source())
        + table(["sequences x tokens", "heads", "µs", "TB/s", "TFLOP/s"], rows)
    )  # fmt: skip


def kernels(records, full, peer):
    lines = full["kernels"]
    ceilings = [line for line in lines if line.startswith("ceilings: ")][0]
    text = "## Kernels\n\n" + para(
        "`quire bench kernels` on " + full.source() + " In brackets: the share of what the device "
        "reaches in the same run, which is " + ceilings.removeprefix("ceilings: ") + ".")  # fmt: skip
    for title, begins in KERNEL_TABLES:
        rows = kernel_rows(lines, begins)
        text += f"### {title}\n\n" + table(["", "µs", "TB/s", "TFLOP/s"], rows)
    steps = [re.match(r"a decode step of (.*) by its parts: (.*)", line) for line in lines]
    text += "### A decode step by its parts\n\n" + table(
        ["streams x tokens", ""], [[m[1], m[2]] for m in steps if m]
    )
    return text + flash_attention(full, peer) + over_fp8(records) + latents(records)


def flash_attention(full, peer):
    rows, fa3 = [], peer["flash_attention_3"]
    for line in full["kernels"]:
        m = KERNEL.match(line)
        what = m["what"].split("heads of 128, ")[-1] if m and "heads of 128, " in line else ""
        if what in fa3["decode_us"]:
            theirs = fa3["decode_us"][what]
            rows.append([f"decode, {what}", f"{m['us']} µs", f"{theirs} µs",
                         beside(float(m["us"]), theirs, True)])  # fmt: skip
        if what in fa3["prefill_tflop_s"]:
            theirs = fa3["prefill_tflop_s"][what]
            rows.append([f"prefill, {what}", f"{float(m['tf']):.0f} TFLOP/s", f"{theirs} TFLOP/s",
                         beside(float(m["tf"]), theirs)])  # fmt: skip
    return (
        "### Beside FlashAttention-3\n\n"
        + para("Paged, blocks of 16 tokens, 32 query heads of 128 over 8 key/value heads; "
               "FlashAttention-3 as vLLM 0.26.0 ships it: " + peer.source())
        + table(["", "Quire", "FlashAttention-3", ""], rows)
    )  # fmt: skip


# ---- quantised numbers ----


def newest_lines():
    """{case: (perplexity's line, greedy's line)} of tests/bench/quantised.py's records."""
    found = {}
    files = [*RECORDS.glob("quantised-smollm2-*.jsonl"), *RECORDS.glob("greedy-*.jsonl")]
    for path in sorted(files, key=lambda p: re.search(r"\d{4}-\d\d-\d\d.*", p.name)[0]):
        for line in map(json.loads, path.read_text().splitlines()):
            found.setdefault(line["case"], {})["held" if "held" in line else "reference"] = line
    return found


def numbers_row(case, words, texts):
    if not words:
        return [case, "", "", "", "", "", f"{100 * texts['held']:g} %"]
    allowed = words.get("llama_cpp") or 1.1 * words.get("kl_rounded", 0)
    return [case, f"{words['reference']:.2f}", f"{100 * (words['reference'] / words['source'] - 1):+.2f} %",
            f"{100 * (words['ratio'] - 1):+.3f} %", f"{words['kl']:.1e}",
            f"{allowed:.1e}" if allowed else "", f"{100 * texts['held']:g} %" if texts else ""]  # fmt: skip


def right_numbers():
    rows = [numbers_row(case, lines.get("reference"), lines.get("held"))
            for case, lines in sorted(newest_lines().items())]  # fmt: skip
    head = ["", "decoded, float32", "to the floats", "Quire", "KL", "KL allowed", "texts held"]
    return (
        "## Quantised SmolLM2 beside its weights decoded\n\n"
        + para("`tests/bench/quantised.py`: perplexity of the weights that a format's own decoder "
               "makes, in float32, and what it lost to the model of floats; Quire's perplexity "
               "beside that, on a CPU; the divergence of its distributions, and what it may be: "
               "llama.cpp's for GGUF, 1.1 times what rounding inputs explains where they are "
               "rounded; of 200 greedy texts those within 0.1 nats of the best token. The newest "
               f"line of each file in `{RECORDS}/quantised-smollm2-*` and `greedy-*`, whose texts "
               "are not all the same.")
        + table(head, rows)
    )  # fmt: skip


# ---- paging, CPU, service ----


def paging(fig12, sizes):
    rows = [[run["shape"], run["dataset"], policy, number(rate)]
            for run in fig12["at"] for policy, rate in run["rate"].items()]  # fmt: skip
    most = [[run["shape"], run["dataset"], policy, number(rate)]
            for run in fig12["most"]
            for policy, rate in run["served_requests_s"].items()]  # fmt: skip
    blocks = [[b, us, sizes["contiguous"][b], sizes["swap_us"][b]]
              for b, us in sizes["block_size"].items()]  # fmt: skip
    head = ["shape", "lengths", "memory", "requests/s"]
    return (
        "## Paging against reservations\n\n"
        + para("`tests/bench/paging_gain`: " + fig12.source() + " Requests a second at "
               f"{fig12['latency_s']} s of normalized latency a token, then those that an "
               "overloaded server completes. `docs/paper.md` has the figures.")
        + table(head, rows) + table(["shape", "lengths", "memory", "completed requests/s"], most)
        + para("`scripts/measure-paging`: " + sizes.source() + " Decode attention of 32 "
               "sequences of 1,024 tokens, and what swapping a token takes (recomputing one: "
               f"{sizes['recompute_us']} µs).")
        + table(["tokens a block", "attention, µs", "contiguous, µs", "swap, µs a token"], blocks)
    )  # fmt: skip


def service(record):
    fair, live, cpu_live = (record[k] for k in
                            ("fair_sim", "fair_live_h200_8b", "fair_live_cpu_smollm2"))  # fmt: skip
    rows = [[f"simulated, {name}, commit {fair['commit']}", at["alone"], number(at["fair"]),
             number(at["fcfs"]), f"{at['ratio']:.2f}x"]
            for name, at in (("CPU", fair["cpu_p99_ms"]), ("8B on a GPU", fair["gpu_8b_p99_ms"]))]
    rows += [[f"8B on an H200, commit {at['commit']}", at["alone"], at["fair"], "",
              f"{at['ratio']:.2f}x"] for at in live["p99_ms"]]
    at = cpu_live["p99_ms"]
    rows.append([f"SmolLM2 on the CPU, commit {cpu_live['commit']}", at["alone"], at["fair"], "",
                 f"{at['ratio']:.2f}x"])  # fmt: skip
    first, null = record["first_byte_us"], record["null_256_streams_server_on_2_of_64_cpus"]
    bytes_ = [[name.replace("_", " "), *(f"{a:g}, {b:g}" for a, b in
               (at["loopback"]["p50"], at["first_byte"]["p50"], at["first_byte"]["p99"]))]
              for name, at in first.items() if isinstance(at, dict)]  # fmt: skip
    idle, soak = record["idle_connections"], record["soak"]
    tok, package = record["tokenizer_smollm2_english"], record["package"]
    rest = [
        ["null model, 256 streams, server on 2 of 64 CPUs, tok/s", number(null["unpaced_tok_s"])],
        [f"{idle['n']:,} idle connections, KiB each", idle["kib_each"]],
        [f"half an hour of everything (`tests/bench/soak`, {soak['commit']}): resident memory, "
         "second quarter and end, MB",
         f"{soak['rss_mb']['second_quarter']}, {soak['rss_mb']['end']}"],
        ["tokenizer of SmolLM2, English, MB/s; tokenizers (Rust)",
         f"{tok['quire_mb_s']}; {tok['tokenizers_mb_s']}"],
        ["container image, MB; of that its base", f"{package['image_mb']}; {package['of_that_base_mb']}"],
    ]  # fmt: skip
    return (
        "## The service\n\n" + para(record.source())
        + para("p99 of the time to first token of one key's requests, alone and beside another "
               "key's flood, ms (`tests/bench/fair_sim`, `tests/bench/fairness`):")
        + table(["", "alone", "`policy: fair`", "`fcfs`", "fair / alone"], rows)
        + para("What server and engine add to a request when idle, µs, two runs "
               f"(`tests/bench/first_byte`, commit {first['commit']}):")
        + table(["", "loopback p50", "first byte p50", "p99"], bytes_) + table(["", ""], rest)
    )  # fmt: skip


def deterministic(record):
    lines = [line for line in record["table"] if line.startswith("decode 64")]
    rows = [re.match(r"(.*): ([\d.]+) ms a step, prefill (\d+)", line).groups() for line in lines]
    return (
        "## Batch-invariant results\n\n" + para("What `deterministic` costs: " + record.source())
        + table(["", "ms a step", "prefill, tok/s"], rows)
    )  # fmt: skip


def all_records(records):
    rows = [[f"`{r.name}`", r.machine, r.commit, r.date] for r in records]
    return "## All records\n\n" + table(["", "machine", "commit", "day"], rows)


def page():
    records = load()
    full, peer = newest_kernels(records), newest_peer(records)
    cells, peers = Cells(records), peer_rates(named(records, "peer-formats"))
    text = INTRO + one_gpu(newest_engine(records, full), newest_starts(records), peer, cells)
    text += quantised(cells, peers) + other_layers(cells, peers)
    text += ranks(records, cells) + other_gpu(cells, records, "H100")
    text += history(records) + kernels(records, full, peer) + deterministic(named(records, "deterministic"))
    text += paging(named(records, "fig12"), named(records, "paging"))
    text += cpu(records) + right_numbers() + service(named(records, "service"))
    return (text + all_records(records)).rstrip("\n") + "\n"


def summary():
    """The table of README.md."""
    records = load()
    full, peer = newest_kernels(records), newest_peer(records)
    cells, peers = Cells(records), peer_rates(named(records, "peer-formats"))
    engine = newest_engine(records, full)
    decode = {row[0]: row for row in decode_rows(cells, peer)}
    rows = [[title, decode[key][1], decode[key][4], decode[key][5]]
            for title, key in (("one stream, tok/s", "1 x 1,024"),
                               ("64 streams at once, tok/s", "64 x 1,024"))]  # fmt: skip
    jobs, start = job_rows(engine, peer), start_rows(newest_starts(records), peer)[0]
    rows += [jobs[2], [start[0], start[1], start[2], ""]]
    rows = [[f"8B on an H200: {row[0]}", row[1], f"vLLM: {row[2]}", row[3]] for row in rows]
    rows += shown_rows(cells, peers)
    kinds = processors(records)
    for model, i in (("bf16", 0), ("bf16", 2), ("Q4_K_M", 0)):
        title, key = CPU_ROWS[i]
        cell = kinds.get("Zen 3", {}).get(f"SmolLM2 {model}", {}).get(key)
        if cell:
            better, ours, theirs = cpu_pair(cell[0], key)
            title = f"135M in {model} on two cores: {title}"
            rows.append([title, ours, f"llama.cpp: {theirs}", better])
    last = max(r.date for r in records if r.name.startswith(("h200-", "cpu-")))
    return table(["", "Quire", "beside it", "times better"], rows) + (
        f"(One H200; two Zen 3 cores with SmolLM2. The newest record of each run, to {last}.)\n"
    )
