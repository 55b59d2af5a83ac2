"""One small file per family: its map from config.json, and the names of its weights."""

from tokenpod.models.families.arcee import ARCEE
from tokenpod.models.families.baichuan import BAICHUAN
from tokenpod.models.families.bamba import BAMBA
from tokenpod.models.families.bert import BERT, MPNET, ROBERTA
from tokenpod.models.families.bloom import BLOOM
from tokenpod.models.families.cohere import COHERE, COHERE2
from tokenpod.models.families.dbrx import DBRX
from tokenpod.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from tokenpod.models.families.ernie4_5 import ERNIE4_5
from tokenpod.models.families.ernie4_5_moe import ERNIE4_5_MOE
from tokenpod.models.families.exaone import EXAONE3, EXAONE4
from tokenpod.models.families.falcon import FALCON
from tokenpod.models.families.falcon_h1 import FALCON_H1
from tokenpod.models.families.family import Family
from tokenpod.models.families.gemma import GEMMA
from tokenpod.models.families.gemma2 import GEMMA2
from tokenpod.models.families.gemma3 import GEMMA3
from tokenpod.models.families.gemma4 import GEMMA4
from tokenpod.models.families.glm import GLM, GLM4
from tokenpod.models.families.glm4_moe import GLM4_MOE
from tokenpod.models.families.glm4_moe_lite import GLM4_MOE_LITE
from tokenpod.models.families.gpt2 import GPT2
from tokenpod.models.families.gpt_bigcode import GPT_BIGCODE
from tokenpod.models.families.gpt_neox import GPT_NEOX
from tokenpod.models.families.gpt_oss import GPT_OSS
from tokenpod.models.families.gptj import GPTJ
from tokenpod.models.families.granite import GRANITE
from tokenpod.models.families.granite_hybrid import GRANITE_HYBRID
from tokenpod.models.families.granite_moe import GRANITE_MOE
from tokenpod.models.families.helium import HELIUM
from tokenpod.models.families.hy_v3 import HY_V3
from tokenpod.models.families.internlm import INTERNLM2, INTERNLM3
from tokenpod.models.families.kimi_linear import KIMI_LINEAR
from tokenpod.models.families.lfm2 import LFM2, LFM2_MOE
from tokenpod.models.families.llama import LLAMA
from tokenpod.models.families.mamba2 import MAMBA2
from tokenpod.models.families.mimo_v2 import MIMO_V2
from tokenpod.models.families.minimax_m2 import MINIMAX_M2
from tokenpod.models.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from tokenpod.models.families.mixtral import MIXTRAL
from tokenpod.models.families.modernbert import MODERNBERT
from tokenpod.models.families.mpt import MPT
from tokenpod.models.families.nemotron import NEMOTRON
from tokenpod.models.families.nemotron_h import NEMOTRON_H
from tokenpod.models.families.olmo import OLMO
from tokenpod.models.families.olmo2 import OLMO2, OLMO3
from tokenpod.models.families.olmoe import OLMOE
from tokenpod.models.families.opt import OPT
from tokenpod.models.families.phi import PHI
from tokenpod.models.families.phi3 import PHI3
from tokenpod.models.families.phimoe import PHIMOE
from tokenpod.models.families.qwen2 import MIMO, QWEN2
from tokenpod.models.families.qwen2_moe import QWEN2_MOE
from tokenpod.models.families.qwen3 import QWEN3
from tokenpod.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from tokenpod.models.families.qwen3_moe import QWEN3_MOE
from tokenpod.models.families.qwen3_next import QWEN3_NEXT
from tokenpod.models.families.seed_oss import SEED_OSS
from tokenpod.models.families.smollm3 import SMOLLM3
from tokenpod.models.families.stablelm import STABLELM
from tokenpod.models.families.starcoder2 import STARCODER2

FAMILIES: tuple[Family, ...] = (
    ARCEE,
    BAICHUAN,
    BAMBA,
    BLOOM,
    COHERE,
    COHERE2,
    DBRX,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    ERNIE4_5,
    ERNIE4_5_MOE,
    EXAONE3,
    EXAONE4,
    FALCON,
    FALCON_H1,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    GLM,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GPT2,
    GPTJ,
    GPT_BIGCODE,
    GPT_NEOX,
    GPT_OSS,
    GRANITE,
    GRANITE_HYBRID,
    GRANITE_MOE,
    HELIUM,
    HY_V3,
    INTERNLM2,
    INTERNLM3,
    KIMI_LINEAR,
    LFM2,
    LFM2_MOE,
    LLAMA,
    MIMO,
    MIMO_V2,
    MINIMAX_M2,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    MIXTRAL,
    MPT,
    NEMOTRON,
    MAMBA2,
    NEMOTRON_H,
    OLMO,
    OLMO2,
    OLMO3,
    OLMOE,
    OPT,
    PHI,
    PHI3,
    PHIMOE,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    SEED_OSS,
    SMOLLM3,
    STABLELM,
    STARCODER2,
)

#: Those whose tokens see what is behind them: texts are read, and not continued.
ENCODERS: tuple[Family, ...] = (BERT, MODERNBERT, MPNET, ROBERTA)

__all__ = ["ENCODERS", "FAMILIES", "Family"]
