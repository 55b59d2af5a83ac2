"""A server on a model that transformers computes."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import transformers
from harness import generate, serve

from tokenpod.models import demo
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb

#: Demo's tokenizer has so many.
VOCABULARY = 4096
NEW_TOKENS = 12


def test_it_streams_what_transformers_generates(tmp_path: Path) -> None:
    """Alone, and as two samples that share their prompt with it."""
    config = transformers.ApertusConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(3)
    model = transformers.ApertusForCausalLM(config).eval()
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
    asked = {"token_ids": pb.TokenIds(ids=prompt)}
    stopping = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with serve("--model-id", str(tmp_path), "--max-total-tokens", "256") as server:
        stub = server.stub()
        (alone,) = generate(stub, pb.GenerateRequest(**asked, stopping=stopping)).samples
        assert alone.token_ids == truth
        assert alone.text == tokenizer.decode(truth, skip_special_tokens=True)
        drawn = {"n": 2, "temperature": 0.7, "seed": 5}
        request = pb.GenerateRequest(**asked, stopping=stopping, sampling=drawn)
        first, again = generate(stub, request), generate(stub, request)
        assert first.samples[0].token_ids != first.samples[1].token_ids
        assert [x.token_ids for x in first.samples] == [x.token_ids for x in again.samples]
        assert "transformers" in server.log.read_text()
        assert server.stop() == 0
