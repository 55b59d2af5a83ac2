"""A server on a model that transformers computes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.checkpoints.demo import DEMO
from support.checkpoints.golden import SharedGoldens
from support.clients.public_api import generate
from support.pods.harness import serve
from tokenpod_client.protos.generate.v1 import generate_pb2 as v1
from tokenpod_client.protos.generate.v1 import generate_pb2_grpc as rpc_v1
from tokenpod_client.protos.generate.v2 import generate_pb2 as v2
from tokenpod_client.protos.generate.v2 import generate_pb2_grpc as rpc_v2
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb
from tokenpod_client.protos.generate.v3 import generate_pb2_grpc as rpc_v3
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as public

#: Demo's tokenizer has so many.
VOCABULARY = 4096
NEW_TOKENS = 12
TEXT = "def add(first, second):"


_SETTINGS = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
#: Over our pool, with a cache of its own, and ours with states: the kind, and whether it pads.
MODELS = {
    "pool": ("apertus", False),
    "padded": ("olmo-hybrid", True),
    "ours": ("qwen3-next", False),
}


@pytest.mark.parametrize(
    ("kind", "pads"),
    [
        # Two ranks serve ours with states in every run (test_group_models.py).
        pytest.param(*model, id=name, marks=[pytest.mark.slow] if name == "ours" else [])
        for name, model in MODELS.items()
    ],
)
def test_it_streams_what_transformers_generates(
    tmp_path: Path, golden: SharedGoldens, kind: str, pads: bool
) -> None:
    """Alone, as two samples of one prompt, and by a router's steps."""
    checkpoint = golden(kind, **_SETTINGS)
    shutil.copytree(checkpoint.folder, tmp_path, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    prompt = [5, 17, 301, 44, 9, 120, 77, 12, 8, 33]
    truth = checkpoint.model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
    )[0, len(prompt) :].tolist()
    asked = {"token_ids": {"ids": prompt}}
    stopping = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with serve("--model-id", str(tmp_path), "--max-total-tokens", "256") as server:
        stub = server.stub()
        (alone,) = generate(stub, public.GenerateRequest(**asked, stopping=stopping)).samples
        assert alone.token_ids == truth
        assert alone.text == tokenizer.decode(truth, skip_special_tokens=True)
        drawn = {"n": 2, "temperature": 0.7, "seed": 5}
        request = public.GenerateRequest(**asked, stopping=stopping, sampling=drawn)
        first, again = generate(stub, request), generate(stub, request)
        assert first.samples[0].token_ids != first.samples[1].token_ids
        assert [x.token_ids for x in first.samples] == [x.token_ids for x in again.samples]
        whose = "tokenpod" if kind == "qwen3-next" else "transformers"
        assert whose in server.log.read_text()
        for protocol, service in ((v1, rpc_v1), (v2, rpc_v2), (pb, rpc_v3)):
            router = service.TextGenerationServiceStub(server.channel())
            assert router.Info(protocol.InfoRequest(), timeout=60).requires_padding == pads
        (whole,) = generate(stub, public.GenerateRequest(text=TEXT, stopping=stopping)).samples
        assert routed(router) == list(whole.token_ids)
        assert server.stop() == 0


def routed(router: Any) -> list[int]:
    """The tokens that a router gets of a batch of one request."""
    parameters = pb.NextTokenChooserParameters(temperature=1.0, top_p=1.0, repetition_penalty=1.0)
    stopping = pb.StoppingCriteriaParameters(max_new_tokens=NEW_TOKENS, ignore_eos_token=True)
    request = pb.Request(
        id=1,
        inputs=TEXT,
        truncate=512,
        add_special_tokens=True,
        parameters=parameters,
        stopping_parameters=stopping,
    )
    request.input_chunks.chunks.add(text=TEXT)
    batch = pb.Batch(id=1, requests=[request], size=1, max_tokens=100)
    answer = router.Prefill(pb.PrefillRequest(batch=batch), timeout=60)
    tokens: list[int] = []
    while True:
        tokens += answer.generations[0].tokens.ids
        if not answer.HasField("batch"):
            return tokens
        answer = router.Decode(pb.DecodeRequest(batches=[answer.batch]), timeout=60)
