"""One small file per family: its map from config.json, and the names of its weights."""

from tokenpod.models.families.bloom import BLOOM
from tokenpod.models.families.falcon import FALCON
from tokenpod.models.families.family import Family
from tokenpod.models.families.gemma2 import GEMMA2
from tokenpod.models.families.gpt_neox import GPT_NEOX
from tokenpod.models.families.llama import LLAMA
from tokenpod.models.families.mistral import MISTRAL
from tokenpod.models.families.mixtral import MIXTRAL
from tokenpod.models.families.opt import OPT
from tokenpod.models.families.phi3 import PHI3
from tokenpod.models.families.qwen2 import QWEN2
from tokenpod.models.families.qwen3 import QWEN3
from tokenpod.models.families.qwen3_moe import QWEN3_MOE

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    MIXTRAL,
    QWEN3_MOE,
    PHI3,
    GEMMA2,
    OPT,
    GPT_NEOX,
    FALCON,
    BLOOM,
)

__all__ = ["FAMILIES", "Family"]
