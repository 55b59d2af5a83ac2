"""A group of two ranks serves a model whose rows have states, with drafts of its own layer."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.checkpoints.demo import DEMO
from support.checkpoints.mtp_layers import make_predicting
from support.clients.public_api import generate
from support.pods.harness import serve
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb

PROMPTS = [[5, 17, 301, 44, 9, 120, 77, 12, 8, 33] * 4, [7, 9, 400, 21], [5, 17, 301, 44, 9] * 8]
NEW_TOKENS = 24


@pytest.mark.slow
def test_two_ranks_say_what_transformers_says_with_drafts(tmp_path: Path) -> None:
    """Together, and from the cache."""
    predicting = make_predicting(
        "qwen3-5", tmp_path / "model", vocab_size=4096, max_position_embeddings=512
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, predicting.folder)
    truth = [predicting.says(prompt, NEW_TOKENS) for prompt in PROMPTS]
    flags = ("--num-shard", "2", "--max-batch-size", "4", "--max-batch-prefill-tokens", "32")
    flags += ("--speculate", "2", "--draft-model", "mtp", "--max-total-tokens", "512")
    with serve("--model-id", str(predicting.folder), *flags) as server:
        stub = server.stub()

        def said(prompt: list[int]) -> tuple[list[int], int]:
            stopping = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
            request = pb.GenerateRequest(token_ids={"ids": prompt}, stopping=stopping)
            answer = generate(stub, request)
            return list(answer.samples[0].token_ids), answer.usage.drafted_token_count

        with ThreadPoolExecutor(len(PROMPTS)) as callers:
            answers = [*callers.map(said, PROMPTS), *callers.map(said, PROMPTS)]
        assert [tokens for tokens, _ in answers] == truth * 2
        assert sum(drafted for _, drafted in answers) > 0
        assert server.stop() == 0
