"""Servers for tests/http/combinations.py: some that are always the same, and any number that
are drawn: model, quantization, cache, speculation, ranks and pool together.

A drawn server is a function of its name, drawn:SEED:BATCH, or device:SEED:BATCH of those
for a GPU: one process, weights in blocks and groups more often, and every second one
without --deterministic, whose kernels are others. What the program refuses is not drawn;
so a server that does not start is a failure. QUIRE_GPU_DEVICE names the device.
"""

import json
import os
import random
import shutil

import head_models
import quantised_models
from conftest import ROOT

TEMPLATE = (
    "{%- if tools %}{{ '<tool_call>' ~ tools | length ~ '\\n' }}{% endif %}"
    "{%- for t in tools or [] %}{{ t.function.name ~ '\\n' }}{%- endfor %}"
    "{%- for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content ~ '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<' ~ who | default('assistant') ~ '>' }}{% endif %}"
)
KEYS = "name=red key=sk-red-0123456789 weight=3\nname=blue key=sk-blue-0123456789\n"

# The pools are small, so that concurrent requests queue, are preempted and resume.
COMMON = (
    f"--device {os.environ.get('QUIRE_GPU_DEVICE', 'cpu')} --threads 1 --access-log none"
    " --swap-space 64MiB --served-model-name demo"
).split()
CONFIGS = {
    "swap": "--kv-cache-dtype fp8 --block-size 8 --kv-blocks 36 --preemption swap"
    " --max-num-seqs 16",
    "recompute": "--block-size 16 --kv-blocks 16 --preemption recompute --max-num-seqs 24"
    " --no-prefix-cache",
    "chunks": "--block-size 4 --kv-blocks 64 --max-num-batched-tokens 24 --policy priority"
    " --preemption recompute --seed 5 --max-num-seqs 12",
    "drafts": "--block-size 8 --kv-blocks 64 --max-num-batched-tokens 48 --max-num-seqs 24"
    " --speculate suffix --max-draft 6",
    "null": "--block-size 16 --kv-blocks 20 --preemption swap --max-num-seqs 16",
    "fair": "--block-size 16 --kv-blocks 20 --policy fair --max-num-seqs 12",
    "ranks": "--tensor-parallel-size 2 --block-size 8 --kv-blocks 40 --preemption swap"
    " --max-num-seqs 16",
    "stages": "--kv-cache-dtype int8 --pipeline-parallel-size 2 --block-size 8"
    " --kv-blocks 40 --preemption recompute --max-num-seqs 16",
    "windows": "--block-size 8 --kv-blocks 80 --preemption swap --max-num-seqs 12",
    "queue": "--block-size 16 --kv-blocks 20 --max-queue 24 --max-num-seqs 6",
}

# ---- drawn servers ----

DRAWN, DEVICE = "drawn", "device"
QUANTIZATIONS = ["fp8", "int8", "int8-g128", "int8-asymmetric", "int8-g128-asymmetric", "mxfp4", "int4"]
BY_ROWS = ["fp8", "int8", "int8-asymmetric"]  # without groups that a rank's part could cut
BLOCKS = ["gguf " + form for form in quantised_models.BLOCKS]
GROUPS = ["groups " + form for form in quantised_models.GROUPS]
MODELS = ["demo", "demo", "windows", "moe", "latent", "hybrid", "dense", "dense", "stored"]
MODELS += ["mixed"] * 3
DEVICE_MODELS = ["demo", "windows", "moe", "latent", "hybrid", *["stored"] * 8, *["mixed"] * 6]
MTP = {"moe": "mtp-glm", "latent": "mtp-latent", "hybrid": "mtp-qwen"}
KV_GROUPS = {"windows": 2, "gpt-oss": 3, "llama4": 4, "gemma4-moe": 2, "gemma4-inputs": 2}
WITH_EXPERTS = (*MTP, *head_models.EXPERTS)
# Ids that an EAGLE-3 head drafts: of the frequent tokens of the bundled model's texts.
DRAFTED_IDS = range(260, 300)
# Drafts that would not pay on this machine are verified, too.
UNKNOWN_COSTS = {"QUIRE_STEP_COSTS": "unknown"}


class Plan:
    """What a server is: flags, its model, the head or draft model beside it (None,
    "eagle3", "peagle" or "draft"), and whether its answers are the same in any company."""

    def __init__(self, flags, model, drafts=None, env=None, exact=True):
        self.flags, self.model, self.drafts, self.env = flags.split(), model, drafts, env or {}
        self.exact = exact
        self.flags += ["--deterministic"] if exact else []


def chance(rng, percent):
    return rng.randrange(100) < percent


def draw_blocks(rng, model, cache):
    """Blocks for a few sequences. Those of a hybrid hold as much as one of its states, which
    fits into 48 tokens if they have 16 bits; snapshots lie that far apart or at the default."""
    size = rng.choice([4, 8, 16])
    if model != "hybrid" and model not in head_models.RECURRENT:
        groups = KV_GROUPS.get(model, 1)
        return f" --block-size {size} --kv-blocks {groups * (rng.choice([192, 256, 400]) // size)}"
    if "8" in cache or chance(rng, 40):
        return f" --block-size {size} --kv-blocks 160"
    apart = rng.choice([48, 48, 96])
    return f" --block-size 48 --kv-blocks {rng.choice([60, 100])} --state-snapshot-tokens {apart}"


def draw_pool(rng, model, cache):
    flags = draw_blocks(rng, model, cache) + cache
    flags += f" --preemption {rng.choice(['swap', 'recompute'])}"
    flags += f" --max-num-seqs {rng.choice([8, 12, 24])}"
    if chance(rng, 30):
        flags += f" --max-num-batched-tokens {rng.choice([24, 48, 100])}"
    if chance(rng, 20):
        flags += " --no-prefix-cache"
    return flags


def draw_drafts(rng, model, stages):
    """Flags of speculation, and the head or draft model."""
    ways = ["off", "grammar", "suffix", "suffix", "auto"]
    if model in MTP and not stages:
        ways += ["mtp"] * 4
    if model == "demo" and not stages:
        ways += ["eagle3", "eagle3 and text", "peagle", "peagle and text", "draft", "draft and text"]
    way = rng.choice(ways)
    flags = f" --max-draft {rng.randint(1, 8)}" if way != "off" else ""
    what = way.removesuffix(" and text")
    if what in ("eagle3", "peagle", "draft"):
        return flags + f" --speculate {'draft' if what == way else 'auto'}", what
    return flags + f" --speculate {way}", None


def draw_cache(rng, model, whole="bf16"):
    """Flags of the cache's type; whole: what may be drawn beside those of 8 bits."""
    latent = model in ("latent", "deepseek-v2-groups")
    kinds = [whole] if latent else [whole, "fp8", "int8"]
    return f" --kv-cache-dtype {rng.choice(kinds)}" if chance(rng, 50) else ""


def draw_model(rng, models):
    model = rng.choice(models)
    kinds = {"dense": head_models.DENSE, "stored": BLOCKS + GROUPS, "mixed": list(head_models.MIXED)}
    return rng.choice(kinds[model]) if model in kinds else model


def is_dummy(model):
    return model in MTP or model in head_models.DENSE or model in head_models.MIXED


def draw_quantization(rng, model, kinds):
    """Of the bundled model sometimes smoothed."""
    kind = rng.choice(kinds)
    smooth = model in ("demo", "windows") and kind in ("int8", "int8-asymmetric") and chance(rng, 50)
    return f" --quantization {kind}" + (" --quantization-smooth 0.5" if smooth else "")


def draw(name):
    """The Plan of the server drawn:SEED:BATCH."""
    rng = random.Random(name)
    model = draw_model(rng, MODELS)
    ranks, stages = (2, 1) if chance(rng, 35) else (1, 2) if chance(rng, 15) else (1, 1)
    if model in BLOCKS + GROUPS:  # two ranks would cut some groups
        ranks = 1
    if model == "gemma4-inputs":  # its last layers read the caches of the first
        stages = 1
    flags = draw_pool(rng, model, draw_cache(rng, model))
    if is_dummy(model):
        flags += " --load-format dummy"
    if ranks > 1:
        flags += " --tensor-parallel-size 2"
        flags += " --expert-parallel" if model in WITH_EXPERTS and chance(rng, 50) else ""
    if stages > 1:
        flags += " --pipeline-parallel-size 2"
    if chance(rng, 60) and model not in BLOCKS + GROUPS:
        small = ranks > 1 and (model in head_models.DENSE or model in head_models.MIXED)
        flags += draw_quantization(rng, model, BY_ROWS if small else QUANTIZATIONS)
    more, drafts = draw_drafts(rng, model, stages > 1)
    return Plan(flags + more, model, drafts, UNKNOWN_COSTS)


def draw_device(name):
    """The Plan of the server device:SEED:BATCH."""
    rng = random.Random(name)
    model = draw_model(rng, DEVICE_MODELS)
    # a GPU has caches of its activations' type, which is not that of every model
    flags = draw_pool(rng, model, draw_cache(rng, model, "auto"))
    flags += " --load-format dummy" if is_dummy(model) else ""
    if model not in BLOCKS + GROUPS and chance(rng, 60):
        flags += draw_quantization(rng, model, QUANTIZATIONS)
    more, drafts = draw_drafts(rng, model, False)
    return Plan(flags + more, model, drafts, UNKNOWN_COSTS, exact=chance(rng, 50))


def plan_of(name):
    if name.startswith(DRAWN):
        return draw(name)
    if name.startswith(DEVICE):
        return draw_device(name)
    model = name if name in ("null", "windows") else "demo"
    return Plan(CONFIGS[name], model)


# ---- their files ----


def change(path, members):
    """Sets members of a JSON file."""
    with open(path, encoding="utf-8") as f:
        config = json.load(f) | members
    with open(path, "w", encoding="utf-8") as f:
        json.dump(config, f)


def write_stored(plan, folder):
    """The model of a folder in the form that the server reads; returns where it is."""
    form = plan.model.partition(" ")[2]
    if plan.model in BLOCKS:
        return quantised_models.write_gguf(folder, form)
    return quantised_models.write_groups(folder, form) if plan.model in GROUPS else folder


def write_model(plan, folder):
    """The model's files in a new folder, with a chat template; returns the folder."""
    at = os.path.join(folder, "demo")
    if plan.model in MTP:
        head_models.write_mtp(at, MTP[plan.model])
    elif plan.model in head_models.DENSE:
        head_models.write_dense(at, plan.model)
    elif plan.model in head_models.MIXED:
        head_models.write_mixed(at, plan.model)
    else:
        shutil.copytree(head_models.DEMO, at)
    change(os.path.join(at, "tokenizer_config.json"), {"chat_template": TEMPLATE})
    if plan.model == "windows":  # in every second layer: two KV groups
        kinds = ["sliding_attention", "full_attention"] * 4
        members = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        change(os.path.join(at, "config.json"), members | {"sliding_window": 24, "layer_types": kinds})
    return at


def smoothing(plan, folder):
    """More flags and variables of a server that smooths: any text, and a cache of its own."""
    if "--quantization-smooth" not in plan.flags:
        return [], {}
    text = os.path.join(head_models.DEMO, "config.json")
    return ["--quantization-text", text], {"CACHE_DIRECTORY": folder}


def draft_flags(plan, folder):
    """Flags that name the head or draft model, whose files are written to the folder."""
    if plan.drafts is None:
        return []
    model = head_models.DEMO
    if plan.drafts != "draft":
        parallel = plan.drafts == "peagle"
        model = head_models.write_eagle3(
            os.path.join(folder, "head"), list(DRAFTED_IDS), parallel
        )
    return ["--draft-model", str(model)]
