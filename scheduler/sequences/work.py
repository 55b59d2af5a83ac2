"""What the scheduler gets, and what it reports of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenpod.core.capacity import BLOCK, MOST_DRAFTS
from tokenpod.core.messages import PROBE_TOKENS
from tokenpod.core.outputs import Advanced, Drafted, Failure, FinishCode, Started
from tokenpod.core.step_limits import StepLimits
from tokenpod.core.windows import WindowRoom


@dataclass(frozen=True, slots=True)
class SnapshotLimits:
    """Of snapshots of rows' states; see `States`."""

    #: How many there are, and the number of the first: they are numbered behind all rows.
    total: int
    first: int
    #: A snapshot is at least so many tokens behind the one before it.
    least: int = 64
    #: So many tokens of a prompt are computed without one, and what a step computes besides.
    stride: int = 1024
    #: Of one prefix, at most.
    per_path: int = 16


#: A step is cut to this part of its prompt tokens, but to no fewer than that, to keep gaps short:
#: so few that they take hardly longer than none, and that prompts are sure to go on.
_GAP_PARTS = 64
_LEAST_PIECE = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """The engine's resources."""

    #: KV slots, without those that are reserved for liveness probes.
    slots: int
    #: Sequences that can hold a row of the executor at once, without a probe's.
    max_rows: int
    #: Longest sequence, prompt and output.
    max_positions: int
    #: Prompt tokens that one step takes, at most.
    prefill_tokens: int
    #: Serve short prompts before longer ones that have come a little earlier.
    shortest_first: bool = False
    #: Nanoseconds that a step with prompts takes at most while others stream, as far as
    #: `least_prompt_tokens` allow it; None: it has no bound.
    max_gap: int | None = None
    #: Such a step keeps that bound while nobody streams, too.
    short_prompts: bool = False
    #: Keep keys and values for later prompts with the same prefix.
    prefix_caching: bool = True
    #: What is forgotten first: "lru" what was used longest ago, "lfu" what few requests have used.
    prefix_eviction: str = "lru"
    #: Whether sequences can begin with slots that another has computed: samples of a request with
    #: its prompt, later ones with a cached prefix. Not where each row keeps a state of its own.
    sharing: bool = True
    #: Snapshots of rows' states, where rows keep any: prompts can begin behind them. None: there is
    #: no room for any.
    snapshots: SnapshotLimits | None = None
    #: Whether the model gives tokens of prompts log probabilities.
    scores_prompts: bool = True
    #: Whether it reads texts for their vectors, and does nothing else.
    pools: bool = False
    #: Whether all of a prompt must be in one step: each of its tokens sees those behind it.
    whole_prompts: bool = False
    #: How many tokens may see each other, of those that a request brings vectors for.
    mutual: int = 0
    #: Whether all tokens of a prompt see each other.
    mutual_prompts: bool = False
    #: Whether requests may bring positions of three axes.
    own_positions: bool = False
    #: Adapters that running sequences can have at once, and those that have been read.
    adapter_slots: int = 0
    adapters: frozenset[int] = frozenset()
    #: How many of the slots have room for an embedding and a head of an adapter's own, and which
    #: adapters need it.
    adapter_heads: int = 0
    whole_adapters: frozenset[int] = frozenset()
    #: Tokens whose keys and values the host's memory holds; fewer than `offload_least` in one place
    #: are computed again rather than copied.
    offload_slots: int = 0
    offload_least: int = 1
    #: Tokens that are kept together there.
    offload_block: int = BLOCK
    #: The slots of layers with a window; None: all layers keep all tokens of a sequence.
    windows: WindowRoom | None = None
    #: Tokens that their masks force, of one row in a step besides its next one, at most.
    forced: int = 0
    #: Drafts of a step, forced tokens among them, at most.
    drafts: int = MOST_DRAFTS

    @property
    def least_prompt_tokens(self) -> int:
        """Prompt tokens that each step has room for, if it has prompts."""
        half = self.prefill_tokens // 2
        if self.max_gap is None:
            return max(half, 1)  # of the rest routers' prompts have half
        return max(self.prefill_tokens // _GAP_PARTS, min(half, _LEAST_PIECE), 1)

    @property
    def caching(self) -> bool:
        """Whether later prompts find what has been computed."""
        return self.prefix_caching and (self.sharing or self.snapshots is not None)

    @property
    def step(self) -> StepLimits:
        """Of one step, with a liveness probe's row and prompt."""
        return StepLimits(self.max_rows + 1, self.prefill_tokens + PROBE_TOKENS, self.drafts)


@dataclass(slots=True)
class Settled:
    """The outcome of a step, or what happened without one. The first three lists are parallel."""

    sequence_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finishes: list[FinishCode] = field(default_factory=list)
    #: By index into these: of tokens that were chosen in a search and not sampled in this step, and
    #: of ends without a token.
    logprobs: dict[int, float] = field(default_factory=dict)
    started: list[Started] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    advanced: list[Advanced] = field(default_factory=list)
    #: Parallel to the first three: which of the step's samples each token is; -1: none of them.
    samples: list[int] = field(default_factory=list)
    drafted: list[Drafted] = field(default_factory=list)
