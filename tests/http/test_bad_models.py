"""Model directories that are broken, inconsistent or incomplete: `quire serve` exits with 1 at once, and one line says what is wrong."""
import json
import os
import re
import shutil
import struct

import pytest
from conftest import PATIENCE_S, ROOT

DEMO = os.path.join(ROOT, "models", "demo")
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:%064d\nsize 13910360\n" % 0


def write(path, data):
    with open(path, "wb") as f:
        f.write(data.encode() if isinstance(data, str) else data)


def changed(name, **more):
    def change(d):
        with open(d / name) as f:
            c = json.load(f)
        write(d / name, json.dumps({**c, **more}))
    return change


def config(**more):
    return changed("config.json", **more)


def tokenizer(edit):
    def change(d):
        with open(d / "tokenizer.json", encoding="utf-8") as f:
            t = json.load(f)
        edit(t)
        write(d / "tokenizer.json", json.dumps(t))
    return change


def replaced(name, data):
    return lambda d: write(d / name, data)


def cut(name, part):
    return lambda d: os.truncate(d / name, int(os.path.getsize(d / name) * part))


def header(edit):
    """Edit the header of model.safetensors; the data stays."""
    def change(d):
        with open(d / "model.safetensors", "rb") as f:
            n = struct.unpack("<Q", f.read(8))[0]
            head, rest = json.loads(f.read(n)), f.read()
        head = edit(head) or head
        text = json.dumps(head).encode()
        write(d / "model.safetensors", struct.pack("<Q", len(text)) + text + rest)
    return change


def index(weight_map):
    def change(d):
        os.rename(d / "model.safetensors", d / "one.safetensors")
        write(d / "model.safetensors.index.json", json.dumps({"weight_map": weight_map}))
    return change


def link(name, target):
    def change(d):
        os.rename(d / name, d.parent / "outside")
        os.symlink(target, d / name)
    return change


def both(*changes):
    return lambda d: [c(d) for c in changes]


def renamed(head):
    head["model.norm.weights"] = head.pop("model.norm.weight")


def reshaped(head):
    head["model.norm.weight"]["shape"] = [16, 16]


def retyped(head):
    head["model.norm.weight"]["dtype"] = "I16"


def lying(head):
    head["model.norm.weight"]["shape"] = [1 << 62, 4]


# An id behind the last one that the model has logits for.
EXTRA = {"id": 4096, "content": "<extra>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
CASES = {
    "no config": (lambda d: os.unlink(d / "config.json"), "config.json"),
    "config cut": (cut("config.json", 0.5), "config.json"),
    "config empty": (replaced("config.json", ""), "config.json"),
    "config of nesting": (replaced("config.json", '{"a":' + "[" * 100000), "config.json"),
    "wrong architecture": (config(architectures=["BertForMaskedLM"]), "BertForMaskedLM is not known; known are LlamaForCausalLM"),
    "no architecture": (config(architectures=[]), "architectures is missing"),
    "absurd sizes": (config(hidden_size=1 << 40), "hidden_size"),
    "sizes of another model": (config(intermediate_size=700), "mlp.gate_proj.weight"),
    "an end of text out of the logits": (replaced("generation_config.json", '{"eos_token_id": 4096}'), "eos_token_id is 4096, vocab_size is 4096"),
    "quantised, no method": (config(quantization_config={"bits": 4}), "quant_method ''"),
    "quantised, unknown": (config(quantization_config={"quant_method": "bitsandbytes"}), "supported are compressed-tensors"),
    "quantised, it says": (config(quantization_config={"quant_method": "fp8"}), "no weight is stored so"),
    "quantised, ModelOpt": (replaced("hf_quant_config.json", '{"quantization": {"quant_algo": "FP8"}}'), "no weight is stored so"),
    "no weights": (lambda d: os.unlink(d / "model.safetensors"), "no weights"),
    "weights cut in the values": (cut("model.safetensors", 0.7), "it is not complete"),
    "weights cut in the header": (replaced("model.safetensors", struct.pack("<Q", 5000) + b'{"a":'), "a header of 5000 bytes"),
    "weights empty": (replaced("model.safetensors", ""), "the file is empty"),
    "weights that are text": (replaced("model.safetensors", "<html>not found</html>" * 9), "a header of"),
    "weights not fetched": (replaced("model.safetensors", POINTER), "model.safetensors: a Git LFS pointer"),
    "tokenizer not fetched": (replaced("tokenizer.json", POINTER), "tokenizer.json: a Git LFS pointer"),
    "a missing and an unknown tensor": (header(renamed), "model.norm.weight"),
    "a shape": (header(reshaped), "model.norm.weight"),
    "a type": (header(retyped), "model.norm.weight"),
    "a size that overflows": (header(lying), "model.norm.weight"),
    "a missing shard": (index({"a": "two.safetensors"}), "'a' is in a shard that is missing"),
    "a shard that is the index": (index({"a": "model.safetensors.index.json"}), "model.safetensors.index.json"),
    "a shard elsewhere": (index({"a": "../outside/one.safetensors"}), "is not the name of a file"),
    "a shard without its tensor": (index({"a": "one.safetensors"}), "tensor 'a' is not in 'one.safetensors'"),
    "an index without tensors": (index({}), "names no tensors"),
    "shards in a circle": (both(index({"a": "two.safetensors"}), lambda d: os.symlink("three.safetensors", d / "two.safetensors"),
                                lambda d: os.symlink("two.safetensors", d / "three.safetensors")), "two.safetensors"),
    "a link out": (link("model.safetensors", "../outside"), "a symbolic link out of the model directory"),
    "a link to a secret": (link("tokenizer.json", "/etc/passwd"), "a symbolic link out of the model directory"),
    "a link to nothing": (link("config.json", "absent"), "config.json"),
    "a pipe": (lambda d: [os.unlink(d / "model.safetensors"), os.mkfifo(d / "model.safetensors")], "not a regular file"),
    "a directory": (lambda d: [os.unlink(d / "config.json"), os.mkdir(d / "config.json")], "not a regular file"),
    "no tokenizer": (lambda d: os.unlink(d / "tokenizer.json"), "tokenizer.json: No such file or directory; nor is there a tokenizer.model"),
    "a link to no tokenizer": (link("tokenizer.json", "nowhere"), "tokenizer.json: a broken symbolic link"),
    "a tokenizer of tiktoken": (lambda d: os.rename(d / "tokenizer.json", d / "tiktoken.model"), "; tiktoken.model is not read"),
    "tokenizer cut": (cut("tokenizer.json", 0.9), "tokenizer.json"),
    "tokenizer of nesting": (replaced("tokenizer.json", '{"model":' * 100000), "tokenizer.json"),
    "a merge out of the vocabulary": (tokenizer(lambda t: t["model"]["merges"].append(["Ġqu", "ireless"])), "merge"),
    "a token out of the logits": (tokenizer(lambda t: t["model"]["vocab"].update(quireless=4096)), "ids up to 4096"),
    "an end of text out of the tokenizer's logits": (both(tokenizer(lambda t: t["added_tokens"].append(EXTRA)),
                                                          changed("tokenizer_config.json", eos_token="<extra>")), "ids up to 4096"),
    "an expression that is none": (tokenizer(lambda t: t.update(pre_tokenizer={
        "type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated", "invert": False})), "tokenizer.json"),
    "a model of another kind": (tokenizer(lambda t: t["model"].update(type="WordPiece")), "WordPiece"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(tmp_path, start, name):
    change, text = CASES[name]
    directory = tmp_path / "model"
    shutil.copytree(DEMO, directory)
    change(directory)
    server = start("--device", "cpu", "--kv-cache-memory", "16MiB", "--max-model-len", "128", model=str(directory), wait=False)
    assert server.process.wait(PATIENCE_S) == 1, server.log
    lines = [x for x in server.log.splitlines() if "cannot start" in x]
    assert len(lines) == 1 and text in lines[0], server.log
    assert len(lines[0]) < 1000 and not re.search(r"0x[0-9a-f]{6}", lines[0])


def test_a_limit_of_the_model_is_told_alone(start):
    """Nothing is said of a GPU, which such a setting has nothing to do with."""
    server = start("--device", "auto", "--max-model-len", "100000", model=DEMO, wait=False)
    assert server.process.wait(PATIENCE_S) == 1
    assert "max_model_len is 100000, but the model was made for" in server.log
    assert "GPU" not in server.log


def test_weights_beyond_the_memory_are_refused_before_they_fill_it(tmp_path, start):
    directory = tmp_path / "model"
    shutil.copytree(DEMO, directory)
    config(hidden_size=65536, intermediate_size=65536, num_hidden_layers=512)(directory)
    server = start("--device", "cpu", "--kv-cache-memory", "64MiB", "--max-model-len", "128", "--load-format", "dummy",
                   model=str(directory), wait=False)
    assert server.process.wait(PATIENCE_S) == 1, server.log
    lines = [x for x in server.log.splitlines() if "cannot start" in x]
    assert len(lines) == 1 and re.search(r"weights take at least \d+ MiB, but of \d+ MiB only \d+ are free", lines[0])


def test_what_backtracks_without_end_is_refused_by_the_request(tmp_path, start):
    """A model's regular expression may take exponential time; the text that triggers it gets an error, and the server goes on."""
    directory = tmp_path / "model"
    shutil.copytree(DEMO, directory)
    tokenizer(lambda t: t.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}))(directory)
    s = start("--device", "cpu", "--kv-cache-memory", "16MiB", "--max-model-len", "128", model=str(directory))
    answer = s.ask("POST", "/v1/completions", json={"prompt": "a" * 40 + "b", "max_tokens": 1})
    assert answer.status_code == 400 and "expression" in answer.json()["error"]["message"], answer.text
    assert s.ask("POST", "/v1/completions", json={"prompt": "hello", "max_tokens": 1}).status_code == 200


def test_an_added_token_without_logits_is_text_like_any_other(tmp_path, start):
    """As in Gemma-3 1B, whose tokenizer has the token of images that the larger models have."""
    flags = ("--device", "cpu", "--kv-cache-memory", "16MiB", "--max-model-len", "128")
    directory = tmp_path / "model"
    shutil.copytree(DEMO, directory)
    tokenizer(lambda t: t["added_tokens"].append(EXTRA))(directory)
    servers = [start(*flags, model=model) for model in (DEMO, str(directory))]
    body = {"prompt": "A fox <extra> said", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    want, got = (s.ask("POST", "/v1/completions", json=body).raise_for_status().json()["choices"][0] for s in servers)
    assert got == want and max(got["prompt_token_ids"]) < 4096
    assert '"added tokens without logits are taken for text" tokens=1' in servers[1].log
