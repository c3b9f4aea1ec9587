"""Writing the files of a Hugging Face model directory, shared by the scripts that make one. Needs numpy only."""
import json
import os
import struct

import numpy as np


def to_bf16(x):
    """Round float32 to bfloat16 (nearest, ties to even), as uint16."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(path, shapes, make):
    """shapes: name -> list of dims; make(name) -> its bf16 values as uint16, asked for in order, one at a time."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        n_bytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + n_bytes]}
        offset += n_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)  # tensors start on a cache line
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            data = make(name)
            assert list(data.shape) == list(shape) and data.dtype == np.uint16, name
            f.write(np.ascontiguousarray(data).tobytes())


def write_json(path, value):
    """Atomic: the file is there whole or not at all."""
    with open(path + ".part", "w", encoding="utf-8") as f:
        json.dump(value, f, ensure_ascii=False, indent=1)
        f.write("\n")
    os.replace(path + ".part", path)
