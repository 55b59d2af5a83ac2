"""How much memory a load takes at its worst: run as a program, in a process of its own."""

from __future__ import annotations

import gc
import json
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from tokenpod.models.load import load_model

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}


def write(folder: Path, hidden: int, inner: int, layers: int) -> None:
    """A checkpoint of random weights in bfloat16."""
    folder.mkdir()
    config = SHAPE | {"hidden_size": hidden, "intermediate_size": inner}
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    sizes = {"model.embed_tokens": (256, hidden), "lm_head": (256, hidden)}
    norms = ["model.norm"]
    for layer in range(layers):
        at = f"model.layers.{layer}"
        sizes |= {f"{at}.self_attn.{x}_proj": (hidden, hidden) for x in "qkvo"}
        sizes |= {f"{at}.mlp.{x}_proj": (inner, hidden) for x in ("gate", "up")}
        sizes[f"{at}.mlp.down_proj"] = (hidden, inner)
        norms += [f"{at}.input_layernorm", f"{at}.post_attention_layernorm"]
    random = torch.empty(max(inner, 256) * hidden, dtype=torch.bfloat16).normal_()
    tensors = {
        f"{name}.weight": random[: rows * columns].view(rows, columns).clone()
        for name, (rows, columns) in sizes.items()
    }
    tensors |= {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def resident(peak: bool) -> int:
    """Bytes, now or at the most since `forget_peak`."""
    name = "VmHWM" if peak else "VmRSS"
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def load(folder: Path, quantize: str) -> object:
    return load_model(
        folder,
        dtype=None,
        device=torch.device("cpu"),
        progress=lambda done, total: None,
        quantize=quantize,
    )


def main() -> None:
    """Print bytes: of the model, more at the worst, more at the end."""
    small, large, quantize = sys.argv[1:]
    torch.set_num_threads(1)
    load(Path(small), quantize)  # what is compiled and imported once
    gc.collect()
    before = resident(peak=False)
    forget_peak()
    model = load(Path(large), quantize)
    peak = resident(peak=True)
    print(model.weight_bytes, peak - before, resident(peak=False) - before)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
