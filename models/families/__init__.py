"""One small file a family: its config map and its weight table."""

from tokenpod.models.families.family import Family
from tokenpod.models.families.llama import LLAMA
from tokenpod.models.families.mistral import MISTRAL
from tokenpod.models.families.mixtral import MIXTRAL
from tokenpod.models.families.qwen2 import QWEN2
from tokenpod.models.families.qwen3 import QWEN3
from tokenpod.models.families.qwen3_moe import QWEN3_MOE

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE)

__all__ = ["FAMILIES", "Family"]
