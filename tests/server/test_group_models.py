"""A group of two ranks serves a model whose layers have windows."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from support.checkpoints.demo import DEMO
from support.checkpoints.golden import SharedGoldens
from support.clients.public_api import generate
from support.pods.harness import serve
from tokenpod.core.windows import WindowRoom
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb

PROMPTS = [[5, 17, 301, 44, 9, 120, 77, 12, 8, 33] * 4, [7, 9, 400, 21], [5, 17, 301, 44, 9] * 8]
#: Several windows.
NEW_TOKENS = 40


@pytest.mark.parametrize("kind", ["gemma3", "gpt-oss"])
def test_two_ranks_say_what_transformers_says_together_and_from_the_cache(
    golden: SharedGoldens, tmp_path: Path, kind: str
) -> None:
    checkpoint = golden(kind, vocab_size=4096, max_position_embeddings=512)
    shutil.copytree(checkpoint.folder, tmp_path, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    truth = [
        checkpoint.model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    window = checkpoint.model.config.sliding_window
    apart = WindowRoom(window, 0).for_rows(8, 512, 64).slots
    assert apart < 8 * 512, "layers with a window have slots of their own here"
    flags = ("--num-shard", "2", "--max-batch-size", "8", "--max-batch-prefill-tokens", "64")
    with serve("--model-id", str(tmp_path), "--max-total-tokens", "512", *flags) as server:
        stub = server.stub()

        def said(prompt: list[int]) -> list[int]:
            stopping = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
            request = pb.GenerateRequest(token_ids={"ids": prompt}, stopping=stopping)
            return list(generate(stub, request).samples[0].token_ids)

        with ThreadPoolExecutor(len(PROMPTS)) as callers:
            assert list(callers.map(said, PROMPTS)) == truth
            assert list(callers.map(said, PROMPTS)) == truth
        assert server.stop() == 0
