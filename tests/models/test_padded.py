"""Families with caches of their own: through the engine, they say what transformers says."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
import torch
from golden_kinds import PADDED_KINDS

from tokenpod.core.messages import (
    EngineOptions,
    Request,
    SamplingParams,
    StepOutputs,
    StoppingParams,
)
from tokenpod.engine.assemble import assemble
from tokenpod.engine.loop import EngineLoop
from tokenpod.models.load import load_model
from tokenpod.models.tier.padded import Together
from tokenpod.scheduler.scheduler import Limits, Scheduler

CPU = torch.device("cpu")
ROWS, POSITIONS, PREFILL, NEW_TOKENS = 5, 200, 16, 24
TOLERANCE = 1e-4

#: What each of these classes does rightly: which rows decode in one batch, and whether pieces of
#: prompts follow each other.
ABILITIES = {
    "qwen3-5": (Together.PADDED, True),
    "qwen3-next": (Together.PADDED, True),
    "jamba": (Together.PADDED, False),
    "mamba2": (Together.ANY, True),
    "rwkv": (Together.ALONE, True),
    "lfm2": (Together.PADDED, True),
    "t5": (Together.PADDED, True),
    "bart": (Together.ALIKE, True),
}


class Client:
    """The other end of an engine's link."""

    def __init__(self, requests):
        self.inbox = list(requests)
        self.left = {i for request in requests for i in request.sequence_ids}
        self.failures = {}
        self.tokens, self.logprobs, self.scored = defaultdict(list), defaultdict(list), {}

    def receive(self, seconds):
        del seconds
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, message):
        assert isinstance(message, StepOutputs)
        for failure in message.failures:
            self.failures[failure.sequence_id] = failure.message
            self.left.discard(failure.sequence_id)
        for i, sequence in enumerate(message.sequence_ids):
            self.tokens[sequence].append(message.token_ids[i])
            self.logprobs[sequence].append(message.logprobs[i])
            if message.finishes[i]:
                self.left.discard(sequence)
        for started in message.started:
            self.scored[started.sequence_id] = started.prompt_logprobs or []


class Engine:
    """A loaded model, and a loop over it."""

    def __init__(self, folder, **more):
        self.model = load_model(
            folder,
            dtype=None,
            device=CPU,
            progress=lambda done, total: None,
            max_total_tokens=POSITIONS,
        )
        options = EngineOptions(
            model_folder="",
            dtype=None,
            device="cpu",
            threads=1,
            max_batch_size=ROWS,
            max_batch_prefill_tokens=PREFILL,
            **more,
        )
        made = assemble(self.model, options, positions=POSITIONS, device=CPU)
        own = self.model.config.own_state
        self.room, self.pool = made.room, made.executor._pool
        self.executor = made.executor
        self.limits = Limits(
            made.slots,
            made.room.rows,
            POSITIONS,
            PREFILL,
            sharing=False,
            scores_prompts=own.scores_prompts,
        )

    def answer(self, requests, *, preempt=0.0, abort=()):
        """Serve all; before each turn every sequence is preempted by chance."""
        client, scheduler = Client(requests), Scheduler(self.limits)
        loop = EngineLoop(client, scheduler, self.executor)
        chance, self.preempted, turns = random.Random(3), 0, 0
        while client.left:
            for sequence in sorted(client.left):
                if chance.random() < preempt:
                    self.preempted += scheduler.preempt(sequence)
            loop.turn()
            turns += 1
            if turns == 4:
                scheduler.abort(abort)
                client.left -= set(abort)
            scheduler.check()
        loop.turn()
        return client


@pytest.fixture(params=PADDED_KINDS)
def name(request):
    return request.param


def requests_of(prompts, *, scored):
    return [
        Request(
            [i],
            prompt,
            SamplingParams(),
            StoppingParams(max_new_tokens=NEW_TOKENS - 3 * (i % 3)),
            logprobs=True,
            prompt_logprobs=scored,
        )
        for i, prompt in enumerate(prompts)
    ]


def expected_logprobs(golden, prompt, outputs):
    """[n, vocabulary] by transformers at once: of what follows, from the first scored position."""
    if not golden.model.config.is_encoder_decoder:
        return golden.logprobs([*prompt, *outputs[:-1]])
    decoder = torch.tensor([[golden.model.config.decoder_start_token_id, *outputs[:-1]]])
    with torch.no_grad():
        logits = golden.model(input_ids=torch.tensor([prompt]), decoder_input_ids=decoder).logits
    return logits[0].log_softmax(-1)


def test_it_says_what_transformers_says(name, golden, text):
    """Pieces of prompts, batches that rows join and leave, rows that begin anew; all scored."""
    checkpoint = golden(name)
    engine = Engine(checkpoint.folder)
    model = engine.model
    assert (model.can.together, model.can.continues) == ABILITIES[name]
    scores = model.config.own_state.scores_prompts
    assert scores == (name not in ("t5", "bart"))
    prompts = [text(length, seed=length) for length in (37, 5, 6, 40, 1, 12, 17)]
    client = engine.answer(requests_of(prompts, scored=scores), preempt=0.04)
    assert not client.failures
    assert engine.preempted > 3
    for i, prompt in enumerate(prompts):
        outputs = client.tokens[i]
        truth = expected_logprobs(checkpoint, prompt, outputs)
        said = [*client.scored[i], *client.logprobs[i]]
        follow = torch.tensor([*prompt[1:], *outputs] if scores else outputs)[:, None]
        torch.testing.assert_close(
            torch.tensor(said), truth.gather(1, follow)[:, 0], rtol=0, atol=TOLERANCE
        )
        assert outputs == truth[-len(outputs) :].argmax(-1).tolist()
    # A step's plan says which rows are free: nobody has said so of the last one's.
    assert len(engine.pool.rows) == 1
