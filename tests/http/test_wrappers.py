"""The text part of models that see or hear: under each architecture's name, with the names that its tensors have in
published files, it gives the text model's log-probabilities, and an image is a 400."""
import functools
import json
import os
import re
import shutil

import pytest
from conftest import ROOT, serving

DEMO = os.path.join(ROOT, "models", "demo")
FLAGS = ("--device", "cpu", "--threads", "1", "--kv-blocks", "64", "--max-model-len", "128", "--served-model-name", "m")
TEXT = "Once upon a time there was a little dog who lived by the sea."
INSIDE, BESIDE = "language_model.model.", "model.language_model."
LLAVA = ("vision_tower.vision_model.post_layernorm.weight", "multi_modal_projector.linear_1.weight")
IDEFICS = ("model.vision_model.post_layernorm.weight", "model.connector.modality_projection.proj.weight")
SOUND = ("audio_tower.layer_norm.weight", "multi_modal_projector.linear_1.weight")
LIGHT = ("model.vision_encoder.ln_pre.weight", "model.vision_projection.linear_1.weight")
# architecture: in place of the text model's "model.", and tensors of the other parts
PUBLISHED = {
    "LlavaForConditionalGeneration": (INSIDE, LLAVA),
    "LlavaNextForConditionalGeneration": (INSIDE, ("image_newline", *LLAVA)),
    "LlavaOnevisionForConditionalGeneration": (INSIDE, ("image_newline", *LLAVA)),
    "Idefics3ForConditionalGeneration": ("model.text_model.", IDEFICS),
    "SmolVLMForConditionalGeneration": ("model.text_model.", IDEFICS),
    "InternVLForConditionalGeneration": (INSIDE, LLAVA),
    "InternVLChatModel": (INSIDE, ("vision_model.embeddings.class_embedding", "mlp1.0.weight")),
    "AyaVisionForConditionalGeneration": (INSIDE, LLAVA),
    "Cohere2VisionForConditionalGeneration": (BESIDE, tuple("model." + name for name in LLAVA)),
    "Lfm2VlForConditionalGeneration": (BESIDE, tuple("model." + name for name in LLAVA)),
    "Glm4vForConditionalGeneration": (BESIDE, ("model.visual.blocks.0.norm1.weight",)),
    "Glm46VForConditionalGeneration": (BESIDE, ("model.visual.blocks.0.norm1.weight",)),
    "Glm4vMoeForConditionalGeneration": (BESIDE, ("model.visual.blocks.0.norm1.weight",)),
    "KimiVLForConditionalGeneration": (INSIDE, LLAVA),
    "KimiK25ForConditionalGeneration": (INSIDE, ("vision_tower.encoder.final_layernorm.weight", "mm_projector.pre_norm.weight")),
    "Kimi_K25ForConditionalGeneration": (BESIDE, ("model.vision_tower.final_layernorm.weight", "model.mm_projector.pre_norm.weight")),
    "Exaone4_5_ForConditionalGeneration": (BESIDE, ("model.visual.blocks.0.norm1.weight",)),
    "LightOnOcrForConditionalGeneration": (BESIDE, LIGHT),
    "LightOnOCRForConditionalGeneration": (BESIDE, LIGHT),
    "VoxtralForConditionalGeneration": (INSIDE, SOUND),
    "Qwen2AudioForConditionalGeneration": (INSIDE, SOUND),
}


def test_each_wrapper_is_here():
    with open(os.path.join(ROOT, "models", "families", "wrappers.c"), encoding="utf-8") as f:
        assert set(re.findall(r'^    \{"(\w+)", "', f.read(), re.M)) == set(PUBLISHED)


def wrap(made, architecture, text="llama", **more):
    """The bundled model as the text part of another."""
    prefix, others = PUBLISHED[architecture]
    shutil.copytree(DEMO, made)
    data = (made / "model.safetensors").read_bytes()
    n = int.from_bytes(data[:8], "little")
    head, size = {}, len(data) - 8 - n
    for name, t in json.loads(data[8:8 + n]).items():
        head[name if name == "__metadata__" else prefix + name.removeprefix("model.")] = t
    for i, name in enumerate(others):
        head[name] = {"dtype": "F32", "shape": [1], "data_offsets": [size + 4 * i, size + 4 * i + 4]}
    raw = json.dumps(head).encode()
    raw += b" " * (-len(raw) % 8)
    (made / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + n:] + bytes(4 * len(others)))
    config = json.loads((made / "config.json").read_text())
    tied = config["tie_word_embeddings"]
    part = "llm_config" if architecture == "InternVLChatModel" else "text_config"
    (made / "config.json").write_text(json.dumps({"architectures": [architecture], "tie_word_embeddings": tied,
                                                  part: config | {"model_type": text} | more, "vision_config": {"hidden_size": 64}}))
    words = json.loads((made / "tokenizer_config.json").read_text())
    words["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (made / "tokenizer_config.json").write_text(json.dumps(words))
    return str(made)


def logprobs(server):
    answer = server.ask("POST", "/v1/completions", json=dict(model="m", prompt=TEXT, max_tokens=1, temperature=0, echo=True, logprobs=1))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["logprobs"]["token_logprobs"]


@functools.cache
def plain():
    with serving(*FLAGS, model=DEMO) as server:
        return logprobs(server)


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_the_text_part_is_the_text_model(architecture, tmp_path):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with serving(*FLAGS, model=wrap(tmp_path / "made", architecture)) as server:
        assert logprobs(server) == plain()
        answer = server.ask("POST", "/v1/chat/completions", json=dict(model="m", messages=[{"role": "user", "content": [image]}]))
    assert answer.status_code == 400 and "image" in answer.json()["error"]["message"]


def test_granite_vision_has_a_text_model_of_granite(tmp_path):
    factors = dict(embedding_multiplier=12.0, attention_multiplier=0.25, residual_multiplier=0.5, logits_scaling=2.0)
    seeing = wrap(tmp_path / "seeing", "LlavaNextForConditionalGeneration", "granite", **factors)
    alone = shutil.copytree(DEMO, tmp_path / "alone")
    config = json.loads((alone / "config.json").read_text())
    (alone / "config.json").write_text(json.dumps(config | factors | {"architectures": ["GraniteForCausalLM"]}))
    with serving(*FLAGS, model=seeing) as one, serving(*FLAGS, model=str(alone)) as other:
        assert logprobs(one) == logprobs(other) != plain()
