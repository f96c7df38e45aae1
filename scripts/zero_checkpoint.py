"""Write a checkpoint of the shape of Llama-3-8B whose weights are zeros. usage: zero_checkpoint.py FOLDER.

The file is sparse: its 16 GB take no room on the disk. Times of a server with it are those of real weights, but for
reading them from the disk. Its tokens are those of the benchmarks' base, words without a meaning.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

from manylora.benchmarks.model_shapes import DTYPE_BYTES, MODELS
from manylora.benchmarks.qwen_shape import make_checkpoints
from manylora.engine.model.spec import decoder_spec, expected_tensors

VOCAB_SIZE = 128_256


def main(folder: Path) -> None:
    """Write config, tokenizer and weights."""
    fields = MODELS[0].config_fields() | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "tie_word_embeddings": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    base, _ = make_checkpoints()
    for file in base.glob("tokenizer*"):
        shutil.copy(file, folder)
    header = dict[str, object]()
    end = 0
    for name, shape in expected_tensors(decoder_spec(fields)).items():
        start = end
        end += math.prod(shape) * DTYPE_BYTES
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
