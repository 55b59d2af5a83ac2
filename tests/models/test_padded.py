"""Families with caches of their own: through the engine, they say what transformers says."""

from __future__ import annotations

import functools
import json

import msgspec
import pytest
import torch
from transformers.models.mamba2 import modeling_mamba2

from support.checkpoints.golden_kinds import PADDED_KINDS, VOCABULARY
from support.engines.engine_link import Client
from support.engines.small_engines import POSITIONS, PREFILL, ROWS, Engine, load, requests_of
from support.kernels.interpreted import DEVICE
from tokenpod.core.capacity import capacity
from tokenpod.core.errors import EngineError
from tokenpod.core.own_state import OwnState
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.gpu.device_executor import DeviceExecutor
from tokenpod.engine.gpu.device_sampler import DeviceSampler, SamplerTiles
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.startup import assemble as assembling
from tokenpod.engine.startup.assemble import make_pool
from tokenpod.engine.startup.memory import FreeMemory
from tokenpod.engine.startup.room import room_for
from tokenpod.kernels.backends.triton import OPERATIONS
from tokenpod.models import load as loading
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.folder import read_config
from tokenpod.models.footprint import footprint_of
from tokenpod.models.tier import padded
from tokenpod.models.tier.padded import Abilities, Together
from tokenpod.models.weights.shard import WHOLE, Shard
from tokenpod.scheduler.scheduler import Limits, Scheduler

pytestmark = pytest.mark.compute

TOLERANCE = 1e-4

#: What each of these classes does rightly: which rows decode in one batch, and whether pieces of
#: prompts follow each other.
ABILITIES = {
    "jamba": (Together.PADDED, False),
    "mamba2": (Together.ANY, True),
    "rwkv": (Together.ALONE, True),
    "olmo-hybrid": (Together.PADDED, True),
    "t5": (Together.PADDED, True),
    "bart": (Together.ALIKE, True),
    "deepseek-v32": (Together.ALIKE, True),
    "glm-moe-dsa": (Together.ALIKE, True),
    "deepseek-v4": (Together.ALIKE, True),
}
#: They take long: of the newest kinds of attention, which choose what is read.
INDEXED = ("deepseek-v32", "glm-moe-dsa", "deepseek-v4")


@pytest.fixture(scope="module")
def engine_of(golden):
    """By name of a kind; loaded once."""
    return functools.cache(lambda name: Engine(golden(name).folder))


@pytest.fixture(
    params=[pytest.param(x, marks=[pytest.mark.slow] * (x in INDEXED)) for x in PADDED_KINDS]
)
def name(request):
    return request.param


def expected_logprobs(golden, prompt, outputs):
    """[n, vocabulary] by transformers at once: of what follows, from the first scored position."""
    if not golden.model.config.is_encoder_decoder:
        return golden.logprobs([*prompt, *outputs[:-1]])
    decoder = torch.tensor([[golden.model.config.decoder_start_token_id, *outputs[:-1]]])
    with torch.no_grad():
        logits = golden.model(input_ids=torch.tensor([prompt]), decoder_input_ids=decoder).logits
    return logits[0].log_softmax(-1)


def test_it_says_what_transformers_says(name, golden, engine_of, text):
    """Pieces of prompts, batches that rows join and leave, rows that begin anew; all scored."""
    checkpoint = golden(name)
    engine = engine_of(name)
    model = engine.model
    assert (model.can.together, model.can.continues) == ABILITIES[name]
    scores = model.config.own_state.scores_prompts
    assert scores == (name not in ("t5", "bart"))
    prompts = [text(length, seed=length) for length in (21, 5, 6, 1, 12, 17)]
    client = engine.answer(requests_of(prompts, scored=scores), preempt=0.06)
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


def test_samples_compute_the_prompt_by_themselves(engine_of, text):
    engine, prompt = engine_of("mamba2"), text(20)
    greedy = Request([1, 2], prompt, SamplingParams(), StoppingParams(8), logprobs=True)
    drawn = SamplingParams(do_sample=True, temperature=0.8, seed=4)
    others = Request([3, 4], prompt, drawn, StoppingParams(8), logprobs=True)
    client = engine.answer([greedy, others])
    assert client.tokens[1] == client.tokens[2]
    assert client.logprobs[1] == pytest.approx(client.logprobs[2], abs=TOLERANCE)
    assert client.tokens[3] != client.tokens[4]
    again = engine.answer([others], preempt=0.1)
    assert engine.preempted
    assert [again.tokens[i] for i in (3, 4)] == [client.tokens[i] for i in (3, 4)]


def test_who_is_cancelled_frees_its_state_and_leaves_the_others(golden, engine_of, text):
    checkpoint, engine = golden("olmo-hybrid"), engine_of("olmo-hybrid")
    prompts = [text(9 + i, seed=i) for i in range(3)]
    client = engine.answer(requests_of(prompts, scored=False), abort=[1])
    assert len(client.tokens[1]) < 5
    for i in (0, 2):
        truth = checkpoint.logprobs([*prompts[i], *client.tokens[i][:-1]])
        assert client.tokens[i] == truth[len(prompts[i]) - 1 :].argmax(-1).tolist()
    assert len(engine.pool.rows) == 1


def test_log_probabilities_of_a_prompt_that_an_encoder_reads_are_refused(golden, text):
    engine = Engine(golden("t5").folder)
    client = engine.answer(requests_of([text(5)], scored=True))
    assert (
        "log probabilities of the prompt are asked for: an encoder reads it" in client.failures[0]
    )
    assert not client.tokens


def test_a_state_that_is_lost_is_found_by_the_check(golden, monkeypatch):
    plain = modeling_mamba2.Mamba2Mixer.forward
    monkeypatch.setattr(
        modeling_mamba2.Mamba2Mixer,
        "forward",
        lambda self, x, cache_params=None, **named: plain(self, x, None, **named),
    )
    with pytest.raises(ModelError, match="its logits are others token by token than by transf"):
        Engine(golden("mamba2").folder)


def test_rows_that_are_mixed_up_in_a_batch_are_left_alone(golden, monkeypatch):
    plain = modeling_mamba2.Mamba2Mixer.forward
    monkeypatch.setattr(
        modeling_mamba2.Mamba2Mixer,
        "forward",
        lambda self, x, **named: plain(self, x.flip(0), **named),
    )
    assert Engine(golden("mamba2").folder).model.can == Abilities(Together.ALONE, continues=True)


@pytest.mark.parametrize("name", ["olmo-hybrid", "jamba"], indirect=True)
def test_lengths_are_mixed_only_if_a_long_and_a_short_text_are_right(name, golden, monkeypatch):
    """A mask that is right for the first tokens of texts alone is found out."""
    right = padded._mask

    def mask(lengths, count, device):
        made = right(lengths, count, device)
        return made if max(lengths) < 32 else torch.ones_like(made)

    monkeypatch.setattr(padded, "_mask", mask)
    assert load(golden(name).folder).can.together is Together.ALIKE


def test_memory_decides_how_many_rows_there_are(engine_of):
    engine = engine_of("mamba2")
    own = engine.model.config.own_state
    # By layer: what the convolution saw last (four of 128 + 2 · 2 · 8), and a state of 8 · 16 · 8.
    assert own == OwnState(3 * 4 * (4 * 160 + 1024), 0)
    assert engine.room.rows == ROWS
    free = FreeMemory(7 * own.row_bytes, "here")
    options = engine.options
    room = room_for(engine.model, options, POSITIONS, free, torch.float32, None)
    # A state is there twice when a batch is made anew, and a liveness probe has a row.
    assert room.rows == 2
    assert "2 sequences at once, with 19.5 KiB of state each" in room.slots_from
    little = FreeMemory(3 * own.row_bytes, "here")
    with pytest.raises(EngineError, match=r"a row's state takes 19.5 KiB: two rows.* do not fit"):
        room_for(engine.model, options, POSITIONS, little, torch.float32, None)


@pytest.mark.parametrize(
    "name",
    # A state, and an encoder.
    [x if x in ("mamba2", "t5") else pytest.param(x, marks=pytest.mark.slow) for x in PADDED_KINDS],
    indirect=True,
)
def test_it_is_sized_as_it_is_loaded(name, golden, engine_of):
    """By `tokenpod size`: the state that is seen without numbers, and rows and slots from it."""
    engine, config = engine_of(name), golden(name).folder
    footprint = footprint_of(config, max_total_tokens=POSITIONS)
    assert footprint.parameters == engine.model.parameters_count
    own = footprint.states[4]
    assert own == engine.model.config.own_state
    options = msgspec.structs.replace(engine.options, max_total_tokens=POSITIONS)
    for free in (20 * own.row_bytes + 600 * own.slot_bytes, 1 << 30):
        room = room_for(engine.model, options, POSITIONS, FreeMemory(free, ""), torch.float32, None)
        less = capacity(footprint, options, memory=0, ranks=1)
        memory = free + less.weights + less.reserved - less.reserve.get("states", 0)
        found = capacity(footprint, options, memory=memory, ranks=1)
        assert (found.rows, found.slots) == (room.rows, room.slots)
    assert found.fits
    few = capacity(footprint, options, memory=memory - free + 3 * own.row_bytes, ranks=1)
    assert few.rows < 1 or not own.row_bytes
    assert not few.fits


@pytest.mark.parametrize(
    "name", [pytest.param("olmo-hybrid", marks=pytest.mark.slow), "mamba2"], indirect=True
)
def test_a_state_in_half_precision_is_sized_as_it_is_loaded(name, golden):
    folder = golden(name, dtype=torch.bfloat16).folder
    footprint = footprint_of(folder, max_total_tokens=POSITIONS)
    assert footprint.dtype == "bfloat16"
    assert footprint.states[2] == load(folder).config.own_state


@pytest.mark.parametrize(("checkpoint", "name"), [("mamba2", "Mamba2"), ("apertus", "Apertus")])
def test_keys_and_values_of_8_bits_are_refused(golden, monkeypatch, checkpoint, name):
    """As on a GPU that can read them."""
    monkeypatch.setattr(assembling, "eight_bits_problem", lambda name, gpu: None)
    said = f"kv_cache_dtype is fp8_e4m3: {name}ForCausalLM is computed by transformers; its keys"
    with pytest.raises(EngineError, match=said):
        Engine(golden(checkpoint).folder, kv_cache_dtype="fp8_e4m3")


def test_what_needs_ranks_or_weights_of_ours_is_refused(golden, tmp_path):
    folder = golden("mamba2").folder
    config = read_config(folder, POSITIONS)
    with pytest.raises(ModelError, match="runs on 1 rank, and there are 2"):
        loading.check_alone(config, Shard(0, 2), None)
    with pytest.raises(ModelError, match="quantize is int8: Mamba2ForCausalLM is computed by"):
        loading.check_alone(config, WHOLE, "int8")
    fields = json.loads((folder / "config.json").read_text())
    del fields["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="no max_position_embeddings; set --max-total-tokens"):
        read_config(tmp_path)
    assert read_config(tmp_path, POSITIONS).max_positions == POSITIONS


def test_steps_of_a_device_are_launched_ahead(golden, text, monkeypatch):
    """A surplus token of a row that has ended goes nowhere; by a GPU's executor and sampler."""
    monkeypatch.setattr(loading, "operations_for", lambda device: OPERATIONS)
    checkpoint = golden("mamba2")
    model = load(checkpoint.folder, DEVICE)
    sampler = DeviceSampler(
        rows=ROWS,
        vocab_size=VOCABULARY,
        device=DEVICE,
        most_edits=4,
        tiles=SamplerTiles(split=64, groups=4, block=64, pivots=4),
    )
    executor = DeviceExecutor(
        model,
        make_pool(model, 200, DEVICE),
        sampler,
        rows=ROWS,
        max_positions=POSITIONS,
        max_tokens=ROWS + PREFILL,
        device=DEVICE,
    )
    prompts = [text(3 + 9 * i, seed=i) for i in range(3)]
    limits = Limits(180, ROWS - 1, POSITIONS, PREFILL, sharing=False)
    client = Client(
        Request(
            [i], text(3 + 9 * i, seed=i), SamplingParams(), StoppingParams(3 + i), logprobs=True
        )
        for i in range(3)
    )
    loop = EngineLoop(client, Scheduler(limits), executor, overlap=True)
    while client.left:
        loop.turn()
    for i, prompt in enumerate(prompts):
        outputs = client.tokens[i]
        truth = checkpoint.logprobs([*prompt, *outputs[:-1]])[len(prompt) - 1 :]
        assert outputs == truth.argmax(-1).tolist()
        assert client.logprobs[i] == pytest.approx(truth.amax(-1).tolist(), abs=TOLERANCE)
