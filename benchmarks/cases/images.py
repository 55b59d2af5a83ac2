"""A model that sees, beside text: images per second, first token, and gaps of running streams.

A pod with random weights of a published shape. Streams of text decode all the time; their gaps are
measured without prompts beside them; then while callers send one prompt of text after the other,
with as many tokens as one with an image has, and read one token; then while each prompt has a new
image; then with the same image again, whose rows are cached. What images cost the streams is the
third against the second.

    images --shape qwen3-vl-8b
    images --shape llava-1.5-7b --streams 32 --callers 4 --seconds 20
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support.models import make_tokenizer
from benchmarks.support.pod import Pod
from benchmarks.support.report import Report
from benchmarks.support.timing import DEVICE

GPU = DEVICE.type == "cuda"
SMOKE = dict.fromkeys(
    ("cpu", "gpu"), "--shape tiny --streams 2 --callers 1 --seconds 2 --size 64 48"
)

_CLIP = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}
_CLIP_FILE = {"image_processor_type": "CLIPImageProcessor"}
_QWEN3 = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "out_hidden_size": 4096,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32064,
    "max_position_embeddings": 4096,
}
_ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
_QWEN3_TEXT = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_parameters": {**_ROPE, "mrope_section": [24, 20, 20]},
}
_QWEN3_FILE = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "size": {"shortest_edge": 65536, "longest_edge": 1310720},
}
_QWEN3_MARK = "<|vision_start|><image><|vision_end|>"
_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4224,
}


def _clip_file(side: int) -> dict[str, Any]:
    crop = {"height": side, "width": side}
    return {**_CLIP_FILE, "size": {"shortest_edge": side}, "crop_size": crop}


#: transformers' class and config of each, its image processor, and what its template writes.
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "llava-1.5-7b": ("Llava", _LLAMA, _CLIP, _clip_file(336), "<image>"),
    "qwen3-vl-8b": (
        "Qwen3VL",
        _QWEN3_TEXT,
        _QWEN3,
        _QWEN3_FILE,
        _QWEN3_MARK,
    ),
    "tiny-qwen3-vl": (
        "Qwen3VL",
        {
            **_QWEN3_TEXT,
            **_SMALL,
            "head_dim": 16,
            "rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]},
        },
        {
            **_QWEN3,
            **{"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2},
            **{"out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        },
        _QWEN3_FILE,
        _QWEN3_MARK,
    ),
    "tiny": (
        "Llava",
        {**_LLAMA, **_SMALL},
        {**_CLIP, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "image_size": 56},
        _clip_file(56),
        "<image>",
    ),
}  # fmt: skip
_MARKS = ("<image>", "<|vision_start|>", "<|vision_end|>")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="llava-1.5-7b" if GPU else "tiny")
    parser.add_argument("--folder", type=Path, help="of the checkpoint, made if it is not there")
    parser.add_argument(
        "--streams", type=int, default=16, help="of text, which decode all the time"
    )
    parser.add_argument("--callers", type=int, default=4, help="who send images, one by one")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each part")
    parser.add_argument("--size", type=int, nargs=2, default=[1024, 768], help="pixels of an image")
    parser.add_argument("flags", nargs="*", help="of tokenpod serve, after --")


def run(asked: argparse.Namespace, report: Report) -> None:
    """One pod; text alone, text beside new images, text beside an image that is known."""
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = make(asked.folder or scratch / "model", asked.shape)
        flags = ["--model-id", str(folder), "--max-concurrent-requests", "512", *asked.flags]
        pod = stack.enter_context(Pod(flags))
        report.row("start", shape=asked.shape, seconds_to_SERVING=pod.started_s)
        for row in asyncio.run(measure(pod.address, asked)):
            report.row(row.pop("case"), **row)


def make(folder: Path, name: str) -> Path:
    """A checkpoint of a shape with random weights, as transformers names them."""
    import transformers
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Tokenizer

    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    kind, text, vision, processor, mark = SHAPES[name]
    demo = Path(__file__).resolve().parents[2] / "models" / "demo"
    make_tokenizer(folder, text["vocab_size"] - len(_MARKS))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in _MARKS])
    ids = [tokenizer.token_to_id(each) for each in _MARKS]
    fields = {"image_token_id": ids[0], "image_token_index": ids[0], "eos_token_id": 1}
    fields |= {"vision_start_token_id": ids[1], "vision_end_token_id": ids[2]}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=False, **fields
    )
    config.architectures = [f"{kind}ForConditionalGeneration"]
    dtype = torch.bfloat16 if GPU else torch.float32
    config.dtype = dtype
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    torch.manual_seed(0)
    part: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    state = model.state_dict()
    for at, (tensor, meta) in enumerate(state.items(), start=1):
        numbers = torch.randn(meta.shape, device=DEVICE, dtype=dtype) * 0.02
        scale = meta.ndim == 1 and tensor.endswith("weight")
        part[tensor] = (numbers + 1 if scale else numbers).cpu()
        where[tensor] = f"model-{len(where) // 64}.safetensors"
        if at == len(state) or not len(where) % 64:
            save_file(part, folder / where[tensor])
            part = {}
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{% for p in m.content %}{{ '"
        + mark
        + "' if p.type == 'image' else "
        "p.text }}{% endfor %}{% endfor %}"
    )
    kept = json.loads((demo / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(kept | {"chat_template": template}))
    return folder


async def measure(address: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all parts."""
    import grpc

    from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import (
        GenerationServiceStub,
    )

    options = [("grpc.max_send_message_length", 1 << 25)]
    async with (
        grpc.aio.insecure_channel(address) as text,
        grpc.aio.insecure_channel(address, options) as images,
    ):
        gaps: list[tuple[float, float]] = []
        stubs: list[Any] = [GenerationServiceStub(text), GenerationServiceStub(images)]
        streams = [asyncio.create_task(decode(stubs[0], gaps)) for _ in range(asked.streams)]
        await asyncio.sleep(3)  # all of them decode
        made = pictures(tuple(asked.size))
        same = next(made)
        rows = []
        length = await tokens_of(stubs[1], same)
        prompts = texts(length)
        cases: list[tuple[str, Any]] = [("text alone", None), (f"prompts of {length}", prompts)]
        for case, source in (*cases, ("new images", made), ("known image", same)):
            gaps.clear()
            began, took = time.perf_counter(), list[float]()
            if source is None:
                await asyncio.sleep(asked.seconds)
            else:
                callers = (
                    look(stubs[1], source, took, began + asked.seconds)
                    for _ in range(asked.callers)
                )
                await asyncio.gather(*callers)
            seconds = time.perf_counter() - began
            found = np.array([gap for at, gap in gaps if at >= began]) * 1e3
            rows.append(
                {
                    "case": case,
                    "gap_p50_ms": float(np.percentile(found, 50)),
                    "gap_p99_ms": float(np.percentile(found, 99)),
                    "text_tokens_per_s": len(found) / seconds,
                    "images_per_s": len(took) / seconds,
                    "first_token_p50_ms": float(np.median(took)) * 1e3 if took else 0.0,
                }
            )
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return rows


async def decode(stub: Any, gaps: list[tuple[float, float]]) -> None:
    """One stream of text after the other; notes when each token came, and the time before it."""
    from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb

    while True:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[5, 6, 7] * 40),
            stopping=pb.StoppingOptions(max_new_tokens=1500, ignore_eos=True),
        )
        last = 0.0
        async for event in stub.Generate(request):
            if event.WhichOneof("event") == "tokens":
                now = time.perf_counter()
                if last:
                    gaps.append((now, now - last))
                last = now


async def tokens_of(stub: Any, image: bytes) -> int:
    """Of a prompt with an image."""
    from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service

    asked = service.TokenizeRequest(chat=seen(image).chat)
    return int((await stub.Tokenize(asked)).token_count)


def texts(length: int) -> Iterator[Any]:
    """Prompts of so many tokens, none like another."""
    from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb

    draw = np.random.default_rng(1)
    while True:
        yield pb.GenerateRequest(token_ids=pb.TokenIds(ids=draw.integers(5, 4000, length)))


def seen(image: bytes) -> Any:
    """A request with one image."""
    from tokenpod_client.protos.tokenpod.v1 import chat_pb2
    from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb

    parts = [
        chat_pb2.ContentPart(image=chat_pb2.Image(data=image)),
        chat_pb2.ContentPart(text="What is this?"),
    ]
    chat = chat_pb2.Chat(messages=[chat_pb2.ChatMessage(role="user", content=parts)])
    return pb.GenerateRequest(chat=chat)


async def look(stub: Any, source: bytes | Iterator[Any], took: list[float], end: float) -> None:
    """Send images, or requests, until the time is over; seconds until the first token of each."""
    while time.perf_counter() < end:
        asked = source if isinstance(source, bytes) else next(source)
        request = seen(asked) if isinstance(asked, bytes) else asked
        request.stopping.max_new_tokens, request.stopping.ignore_eos = 1, True
        began = time.perf_counter()
        async for _ in stub.Generate(request):
            pass
        took.append(time.perf_counter() - began)


def pictures(size: tuple[int, int]) -> Iterator[bytes]:
    """JPEGs of smooth colours, each another one: made ahead, so that making them costs no time."""
    from PIL import Image

    draw = np.random.default_rng(0)
    base = Image.fromarray(draw.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(size)
    out = io.BytesIO()
    base.save(out, "JPEG", quality=90)
    data = out.getvalue()
    number = 0
    while True:
        # A comment (COM) behind the first marker: other bytes, and the same work.
        number += 1
        comment = str(number).encode()
        yield data[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + data[2:]
