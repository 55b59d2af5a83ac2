"""One small file per family: its map from config.json, and the names of its weights."""

from tokenpod.models.families.bloom import BLOOM
from tokenpod.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from tokenpod.models.families.ernie4_5_moe import ERNIE4_5_MOE
from tokenpod.models.families.falcon import FALCON
from tokenpod.models.families.family import Family
from tokenpod.models.families.gemma2 import GEMMA2
from tokenpod.models.families.glm4_moe import GLM4_MOE
from tokenpod.models.families.gpt_neox import GPT_NEOX
from tokenpod.models.families.gpt_oss import GPT_OSS
from tokenpod.models.families.llama import LLAMA
from tokenpod.models.families.mistral import MISTRAL
from tokenpod.models.families.mixtral import MIXTRAL
from tokenpod.models.families.opt import OPT
from tokenpod.models.families.phi3 import PHI3
from tokenpod.models.families.qwen2 import QWEN2
from tokenpod.models.families.qwen2_moe import QWEN2_MOE
from tokenpod.models.families.qwen3 import QWEN3
from tokenpod.models.families.qwen3_moe import QWEN3_MOE

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    MIXTRAL,
    QWEN3_MOE,
    QWEN2_MOE,
    GLM4_MOE,
    ERNIE4_5_MOE,
    GPT_OSS,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    PHI3,
    GEMMA2,
    OPT,
    GPT_NEOX,
    FALCON,
    BLOOM,
)

__all__ = ["FAMILIES", "Family"]
