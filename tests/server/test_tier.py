"""A server on a model that transformers computes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.clients.public_api import generate
from support.pods.harness import serve
from tokenpod.models import demo
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


_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_LINEAR = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
}
#: Over our pool, with a cache of its own, and ours with states: class, settings, whether it pads.
MODELS = {
    "pool": ("Apertus", {}, False),
    "padded": ("Lfm2", {"layer_types": ["conv", "full_attention"]}, True),
    "ours": ("Qwen3Next", {**_LINEAR, **_EXPERTS}, False),
}


@pytest.mark.parametrize(("name", "settings", "pads"), MODELS.values(), ids=MODELS)
def test_it_streams_what_transformers_generates(
    tmp_path: Path, name: str, settings: dict[str, Any], pads: bool
) -> None:
    """Alone, as two samples of one prompt, and by a router's steps."""
    model_class = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(3)
    model = model_class(model_class.config_class(**_SIZES, **settings)).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.15)
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(demo.__file__).parent / name, tmp_path)
    prompt = [5, 17, 301, 44, 9, 120, 77, 12, 8, 33]
    truth = model.generate(
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
        whose = "tokenpod" if model_class is transformers.Qwen3_5ForCausalLM else "transformers"
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
