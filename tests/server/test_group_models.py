"""A group of two ranks serves models whose layers keep more than a key and value for each token."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from support.checkpoints.demo import DEMO
from support.checkpoints.golden import SharedGoldens
from support.checkpoints.mtp_layers import make_predicting
from support.clients.public_api import generate
from support.pods.harness import ServerProcess, serve
from tokenpod.core.windows import WindowRoom
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2 import GetLoadRequest

PROMPTS = [[5, 17, 301, 44, 9, 120, 77, 12, 8, 33] * 4, [7, 9, 400, 21], [5, 17, 301, 44, 9] * 8]
#: Several windows.
NEW_TOKENS = 14
FLAGS = ("--num-shard", "2", "--max-total-tokens", "512", "--max-batch-prefill-tokens", "64")


def _served(checkpoint, folder: Path) -> list[list[int]]:
    """Put the checkpoint with a tokenizer into `folder`; what transformers says to the prompts."""
    shutil.copytree(checkpoint.folder, folder, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return [
        checkpoint.model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


def _asking(server: ServerProcess) -> Callable[[list[int]], list[int]]:
    stub = server.stub()

    def said(prompt: list[int]) -> list[int]:
        stopping = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        request = pb.GenerateRequest(token_ids={"ids": prompt}, stopping=stopping)
        return list(generate(stub, request).samples[0].token_ids)

    return said


@pytest.mark.parametrize("kind", ["gpt-oss", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_windows_over_two_ranks_say_what_transformers_says_together_and_from_the_cache(
    golden: SharedGoldens, tmp_path: Path, kind: str
) -> None:
    checkpoint = golden(kind, vocab_size=4096, max_position_embeddings=512)
    truth = _served(checkpoint, tmp_path)
    window = checkpoint.model.config.sliding_window
    apart = WindowRoom(window, 0).for_rows(8, 512, 64).slots
    assert apart < 8 * 512, "layers with a window have slots of their own here"
    with serve("--model-id", str(tmp_path), *FLAGS, "--max-batch-size", "8") as server:
        said = _asking(server)
        with ThreadPoolExecutor(len(PROMPTS)) as callers:
            assert list(callers.map(said, PROMPTS)) == truth
            assert list(callers.map(said, PROMPTS)) == truth
        assert server.stop() == 0


@pytest.mark.slow
def test_rows_with_states_are_used_again_on_both_ranks(
    golden: SharedGoldens, tmp_path: Path
) -> None:
    """Two rows for six calls: each of the later ones gets a row whose state another one left."""
    truth = _served(golden("qwen3-5", vocab_size=4096, max_position_embeddings=512), tmp_path)
    with serve("--model-id", str(tmp_path), *FLAGS, "--max-batch-size", "2") as server:
        said = _asking(server)
        with ThreadPoolExecutor(2 * len(PROMPTS)) as callers:
            assert list(callers.map(said, PROMPTS * 2)) == truth * 2
        # Alone, in rows that have been used, from snapshots of the states.
        assert [said(prompt) for prompt in PROMPTS] == truth
        assert server.stop() == 0


def test_rows_with_states_have_drafts_of_the_checkpoints_own_layer(tmp_path: Path) -> None:
    """Together, and behind snapshots of rows that had drafts."""
    predicting = make_predicting(
        "qwen3-5", tmp_path / "model", vocab_size=4096, max_position_embeddings=512
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, predicting.folder)
    truth = [predicting.says(prompt, NEW_TOKENS) for prompt in PROMPTS]
    drafts = ("--max-batch-size", "2", "--speculate", "2", "--draft-model", "mtp")
    with serve("--model-id", str(predicting.folder), *FLAGS, *drafts) as server:
        said = _asking(server)
        with ThreadPoolExecutor(2 * len(PROMPTS)) as callers:
            assert list(callers.map(said, PROMPTS * 2)) == truth * 2
        assert [said(prompt) for prompt in PROMPTS] == truth
        assert server.stub().GetLoad(GetLoadRequest()).drafted_token_count > 0
        assert server.stop() == 0
