"""adapter_config.json of PEFT, read strictly: a field that changes what is computed is understood
or refused by its name.

Which modules an adapter has, and of which ranks, its tensors say. So the fields that chose them for
training (`target_modules`, `layers_to_transform`, `rank_pattern`) need not be evaluated here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields

#: Fields that say nothing about what is computed from the saved tensors.
_NEUTRAL = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
        *("peft_type", "peft_version", "target_modules", "exclude_modules", "rank_pattern"),
        *("layers_to_transform", "layers_pattern", "fan_in_fan_out", "lora_dropout"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core"),
        *("runtime_config", "qalora_group_size", "ensure_weight_tying"),
    }
)
#: Fields that `read_lora` understands.
_READ = frozenset(
    {"r", "lora_alpha", "alpha_pattern", "use_rslora", "bias", "init_lora_weights", "use_dora"}
)
#: Fields of what can only be fused.
_WHOLE = frozenset({"modules_to_save"})
#: Ways of initialising that leave the base's weights as they are.
_INITIAL = (True, False, "gaussian", "eva", "orthogonal", "lora_ga")

#: Patterns come from files that others wrote: these bounds keep their matching short.
_MOST_PATTERNS = 4096
_MOST_PATTERN_LENGTH = 256
_MOST_REPEATS = 3


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What the config of a LoRA adapter says of its arithmetic."""

    source: str
    rank: int
    alpha: float
    #: Ranks that modules may have besides.
    ranks: frozenset[int]
    #: Alphas of modules whose names end so, in order.
    alphas: tuple[tuple[re.Pattern[str], float], ...]
    #: Divide by the root of the rank.
    by_root: bool
    #: Whether biases of the base may be replaced.
    biases: bool
    #: Whether outputs get lengths of the adapter's own (DoRA).
    dora: bool
    #: Whether it may bring whole modules.
    saves: bool = False
    #: Whether factors of an embedding are those of a head that is tied to it.
    ties: bool = False

    def scale(self, module: str, rank: int) -> float:
        """What a module's product of that rank is multiplied with."""
        if rank != self.rank and rank not in self.ranks:
            raise ModelError(
                f"{self.source}: {module} has rank {rank}; r is {self.rank}, and rank_pattern has"
                f" {sorted(self.ranks) or 'no other'}"
            )
        own = (alpha for pattern, alpha in self.alphas if pattern.fullmatch(module))
        alpha = next(own, self.alpha)
        return alpha / (rank**0.5 if self.by_root else rank)


def read_lora(fields: Fields, *, whole: bool = False, heads: bool = False) -> LoraConfig:
    """What a LoRA adapter's config says. Raises ModelError for fields that are not understood.

    `whole`: it is fused into its base, so what changes whole weights is understood too. `heads`:
    there is room for an embedding and a head of its own.
    """
    fields.only("bias", "none", "all", "lora_only")
    fields.only("init_lora_weights", *_INITIAL)
    saves = bool(fields.values.get("modules_to_save"))
    if saves and not whole:
        fields.only("ensure_weight_tying", False)
    room = frozenset({"modules_to_save"}) if heads else frozenset()
    _refuse_others(fields, _WHOLE if whole else room)
    patterns = _numbers(fields, "alpha_pattern")
    return LoraConfig(
        source=fields.source,
        rank=fields.integer("r", 8, most=1 << 16),
        alpha=fields.real("lora_alpha", 8),
        ranks=frozenset(map(int, _numbers(fields, "rank_pattern").values())),
        alphas=tuple((_pattern(fields, key), value) for key, value in patterns.items()),
        by_root=fields.flag("use_rslora", False),
        biases=fields.text("bias", "none") != "none",
        dora=fields.flag("use_dora", False),
        saves=saves,
        ties=fields.flag("ensure_weight_tying", False),
    )


def _refuse_others(fields: Fields, also: frozenset[str]) -> None:
    for name, value in fields.values.items():
        # What is null, false or empty asks for nothing.
        if name in _NEUTRAL or name in _READ or name in also or not value:
            continue
        shown = repr(value)[:80]
        if name == "modules_to_save":
            raise ModelError(
                f"{fields.source}: modules_to_save is {shown}: there is no room for whole modules"
                " (--max-adapter-heads takes it for an embedding and a head; --lora-fuse serves an"
                " adapter that is fused into its base)"
            )
        raise ModelError(f"{fields.source}: {name} is {shown}, which is not supported")


def _numbers(fields: Fields, name: str) -> Mapping[str, float]:
    if name not in fields:
        return {}
    inner = fields.fields(name)
    if len(inner.values) > _MOST_PATTERNS:
        raise ModelError(
            f"{fields.source}: {name} has {len(inner.values)} entries; at most {_MOST_PATTERNS}"
        )
    return {key: inner.real(key) for key in inner.values}


def _pattern(fields: Fields, key: str) -> re.Pattern[str]:
    """Matches names that end in `key`, a regular expression, as a whole part of the path."""
    repeats = sum(key.count(each) for each in "*+{")
    if len(key) > _MOST_PATTERN_LENGTH or repeats > _MOST_REPEATS:
        raise ModelError(
            f"{fields.source}: alpha_pattern has {key[:80]!r}: a pattern has at most"
            f" {_MOST_PATTERN_LENGTH} characters and {_MOST_REPEATS} repetitions"
        )
    try:
        return re.compile(rf"(?:.*\.)?(?:{key})")
    except re.error as error:
        raise ModelError(
            f"{fields.source}: alpha_pattern has {key[:80]!r}, no regular expression ({error})"
        ) from None
