"""Tiny random checkpoints, and a scheduler by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tokenpod.kernels.batch import ForwardBatch, Run
from tokenpod.kernels.pool import KVPool
from tokenpod.models.decoder import Decoder
from tokenpod.models.load import load_model

VOCABULARY = 96
MAX_POSITIONS = 256
CPU = torch.device("cpu")

#: Wide initial weights, so that attention and the order of tokens matter to the result.
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}


#: As SMALL, for families that name things otherwise.
OPT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "ffn_dim": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "init_std": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}
FALCON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "ffn_hidden_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}
BLOOM = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "n_layer": 3,
    "n_head": 4,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}
#: By model class; others get SMALL.
BASES = {"OPT": OPT, "Falcon": FALCON, "Bloom": BLOOM}

FACTORS = {"long_factor": [2.0, 3.5, 5.0, 9.0], "short_factor": [1.0, 1.1, 1.3, 1.7]}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


#: name -> (config class, model class, settings).
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "llama-grouped-tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-odd-vocabulary": ("Llama", {"vocab_size": VOCABULARY + 1}),
    "llama-odd-vocabulary-tied": (
        "Llama",
        {"vocab_size": VOCABULARY + 1, "tie_word_embeddings": True},
    ),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-relu": ("Llama", {"hidden_act": "relu"}),
    "llama-wide-heads": ("Llama", {"head_dim": 24}),
    "llama-linear": ("Llama", rope("linear", factor=4.0)),
    "llama-dynamic": ("Llama", rope("dynamic", factor=2.0)),
    "llama-llama3": (
        "Llama",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-yarn": (
        "Llama",
        rope("yarn", factor=8.0, original_max_position_embeddings=32),
    ),
    "llama-yarn-mscale": (
        "Llama",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            mscale=1.2,
            mscale_all_dim=0.7,
            beta_fast=16.0,
            beta_slow=2.0,
            truncate=False,
        ),
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-window": (
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 9},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "opt": ("OPT", {}),
    "opt-350m": ("OPT", {"do_layer_norm_before": False, "word_embed_proj_dim": 48}),
    "opt-plain": ("OPT", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "gpt-neox": ("GPTNeoX", {"num_key_value_heads": 4}),
    "gpt-neox-sequential": (
        "GPTNeoX",
        {
            "num_key_value_heads": 4,
            "use_parallel_residual": False,
            "attention_bias": False,
            **rope("default", partial_rotary_factor=0.5),
        },
    ),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24}),
    "gemma2-no-caps": (
        "Gemma2",
        {
            "head_dim": 32,
            "num_key_value_heads": 1,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "falcon-7b": ("Falcon", {}),
    "falcon-40b": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-rw": (
        "Falcon",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "bloom": ("Bloom", {}),
    "bloom-odd-heads": ("Bloom", {"hidden_size": 48, "n_head": 6}),
    "phi3": ("Phi3", {"sliding_window": 19, "pad_token_id": None}),
    "phi3-short": (
        "Phi3",
        {
            "pad_token_id": None,
            "max_position_embeddings": 4 * MAX_POSITIONS,
            "original_max_position_embeddings": MAX_POSITIONS,
            **rope("longrope", partial_rotary_factor=0.5, **FACTORS),
        },
    ),
    # transformers chooses by the length of a text, we by that of all that may come.
    "phi3-long": (
        "Phi3",
        {
            "pad_token_id": None,
            "original_max_position_embeddings": 32,
            **rope(
                "longrope",
                partial_rotary_factor=0.5,
                long_factor=FACTORS["long_factor"],
                short_factor=FACTORS["long_factor"],
            ),
        },
    ),
    "qwen3-moe-some-dense": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 5,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 11,
        },
    ),
}


@dataclass
class Golden:
    """A checkpoint and the model that transformers makes of it."""

    folder: Path
    model: Any

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocabulary] float32."""
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits.float().log_softmax(-1)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The continuation that transformers generates."""
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Golden]:
    """Makes (once) the checkpoint of a kind; more settings make another."""
    made: dict[str, Golden] = {}

    def make(kind: str, *, dtype: torch.dtype = torch.float32, **more: Any) -> Golden:
        key = f"{kind} {dtype} {more}"
        if key not in made:
            family, settings = KINDS[kind]
            base = BASES.get(family, SMALL)
            config = getattr(transformers, f"{family}Config")(**{**base, **settings, **more})
            torch.manual_seed(7)
            model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
            for name, parameter in model.named_parameters():
                # Biases begin as zeros and norms as ones: tests would not see them left out.
                if parameter.ndim == 1:
                    scales = "norm" in name or "ln_" in name
                    torch.nn.init.normal_(parameter, mean=float(scales), std=0.2)
            folder = tmp_path_factory.mktemp(kind)
            model.to(dtype).save_pretrained(folder)
            made[key] = Golden(folder, model)
        return made[key]

    return make


def load(folder: Path, dtype: torch.dtype | None = None) -> Decoder:
    return load_model(
        folder,
        dtype=dtype,
        device=CPU,
        progress=lambda done, total: None,
        max_total_tokens=MAX_POSITIONS,
    )


@dataclass
class Sequence:
    """What a scheduler knows of one sequence."""

    row: int
    tokens: list[int]
    #: Slots of the positions so far, in order.
    slots: list[int] = field(default_factory=list)

    @property
    def runs(self) -> list[Run]:
        runs: list[Run] = []
        for slot in self.slots:
            if runs and runs[-1][1] == slot:
                runs[-1] = (runs[-1][0], slot + 1)
            else:
                runs.append((slot, slot + 1))
        return runs


class HandScheduler:
    """Places sequences in slots and runs steps, each as the test says."""

    def __init__(self, model: Decoder, *, slots: int = 512, rows: int = 16) -> None:
        self.model = model
        config = model.config
        self.pool = KVPool(
            layers=len(config.layers),
            slots=slots,
            layout=config.kv,
            dtype=model.dtype,
            device=CPU,
        )
        for tensor in (*self.pool.keys, *self.pool.values):
            tensor.fill_(float("nan"))  # what nobody wrote must not be read
        self.row_table = torch.zeros((rows, MAX_POSITIONS), dtype=torch.int32)
        self.free = list(range(slots))
        self.rows = 0

    def sequence(self, tokens: list[int], *, prefix_of: Sequence | None = None, shared: int = 0):
        """A new sequence whose first `shared` positions are another's."""
        sequence = Sequence(self.rows, list(tokens))
        self.rows += 1
        if prefix_of is not None:
            assert tokens[:shared] == prefix_of.tokens[:shared]
            sequence.slots = prefix_of.slots[:shared]
        return sequence

    def skip_slots(self, count: int, *, every: int = 1) -> None:
        """Make the next slots handed out begin later, or lie apart."""
        self.free = self.free[count::every]

    def step(self, works: list[tuple[Sequence, int]]) -> list[torch.Tensor]:
        """Process so many tokens of each; logprobs [n, vocabulary] of each, in order of `works`."""
        order = sorted(range(len(works)), key=lambda i: works[i][1] != 1)
        tokens, positions, slots, starts = [], [], [], [0]
        for i in order:
            sequence, count = works[i]
            first = len(sequence.slots)
            for position in range(first, first + count):
                slot = self.free.pop(0)
                sequence.slots.append(slot)
                tokens.append(sequence.tokens[position])
                positions.append(position)
                slots.append(slot)
            context = len(sequence.slots)
            self.row_table[sequence.row, :context] = torch.tensor(sequence.slots)
            starts.append(len(tokens))
        batch = ForwardBatch(
            t_token=torch.tensor(tokens),
            t_position=torch.tensor(positions),
            t_slot=torch.tensor(slots),
            b_start=starts,
            b_context=[len(works[i][0].slots) for i in order],
            b_runs=[works[i][0].runs for i in order],
            b_row=[works[i][0].row for i in order],
            row_table=self.row_table,
            single_rows=sum(count == 1 for _, count in works),
            logit_index=torch.arange(len(tokens)),
        )
        hidden = self.model.forward(batch, self.pool)
        logprobs = self.model.logits(hidden[batch.logit_index]).float().log_softmax(-1)
        results: list[torch.Tensor] = [torch.empty(0)] * len(works)
        for place, i in enumerate(order):
            results[i] = logprobs[starts[place] : starts[place + 1]]
        return results

    def greedy(self, sequence: Sequence, count: int) -> list[int]:
        """Process what is left of the tokens, then generate."""
        for _ in range(count):
            (logprobs,) = self.step([(sequence, len(sequence.tokens) - len(sequence.slots))])
            sequence.tokens.append(int(logprobs[-1].argmax()))
        return sequence.tokens[-count:]


@pytest.fixture
def text() -> Callable[..., list[int]]:
    """Random tokens: the same for the same seed."""

    def make(length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(VOCABULARY, (length,), generator=generator).tolist()

    return make


@pytest.fixture(autouse=True)
def _one_thread():
    """Tests share the machine; tiny tensors gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def load_folder() -> Callable[..., Decoder]:
    return load


@pytest.fixture(scope="session")
def schedule() -> type[HandScheduler]:
    return HandScheduler


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", KINDS)
