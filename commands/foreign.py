"""Flags and variables of other servers and of earlier versions, by what they are called here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tokenpod.service.config.settings import REMOVED

#: vLLM's flags that ours have other names for.
_VLLM = {
    "--model": "--model-id, or just the model after serve",
    "--tokenizer": "nothing: the tokenizer is in the model's folder",
    "--host": "--hostname",
    "--tensor-parallel-size": "--num-shard",
    "--pipeline-parallel-size": "--num-shard and --num-nodes, which divide layers by width",
    "--max-model-len": "--max-total-tokens",
    "--max-num-seqs": "--max-batch-size",
    "--max-num-batched-tokens": "--max-batch-prefill-tokens",
    "--gpu-memory-utilization": "--memory-fraction, of what is free once the model is loaded",
    "--enable-prefix-caching": "nothing: it is on, and --no-prefix-caching turns it off",
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "--enable-chunked-prefill": "nothing: prompts are always cut into pieces",
    "--hf-overrides": "--config-override",
    "--max-logprobs": "--max-top-n-tokens",
    "--api-key": "--auth-token-file, which keeps it out of the process list",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--ssl-ca-certs": "--tls-client-ca",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--trust-remote-code": "nothing: no code of a model's repository is ever run",
    "--enforce-eager": "nothing: what steps are captured is the server's choice",
    "--swap-space": "--host-kv-bytes",
    "--kv-offloading-size": "--host-kv-bytes",
    "--block-size": "nothing: the cache is kept by single tokens",
    "--seed": "a seed of each request",
    "--load-format": "nothing: weights are safetensors, and `tokenpod convert` makes them",
    "--download-dir": "--download",
    "--max-loras": "--max-adapters",
    "--max-lora-rank": "--max-adapter-rank",
    "--lora-modules": "--lora-adapters, as NAME=PATH,NAME=PATH",
    "--enable-lora": "--lora-adapters and --max-adapters",
    "--tool-call-parser": "--tool-parser",
    "--enable-auto-tool-choice": "nothing: calls of tools are found where --tool-parser fits",
    "--speculative-config": "--speculate, and --draft-model for a model that drafts",
    "--scheduling-policy": "--admission and --batching",
    "--structured-outputs-config": "nothing: constraints of requests are always served",
    "--guided-decoding-backend": "nothing: constraints of requests are always served",
    "--data-parallel-size": "nothing: each copy of a model is a pod, behind one Service",
}
#: The same of TGI's launcher; most of its flags are ours by the same name.
_TGI = {
    "--model": "--model-id, or just the model after serve",
    "--sharded": "--num-shard",
    "--max-input-length": "--max-input-tokens",
    "--shard-uds-path": "--uds-path",
    "--master-shard-uds-path": "--uds-path",
    "--cuda-memory-fraction": "--memory-fraction, of what is free once the model is loaded",
    "--rope-scaling": "--config-override",
    "--rope-factor": "--config-override",
    "--api-key": "--auth-token-file, which keeps it out of the process list",
    "--prometheus-port": "--otlp-endpoint: metrics are pushed",
    "--weights-cache-override": "--download",
    "--huggingface-hub-cache": "the variable HF_HUB_CACHE",
    "--disable-custom-kernels": "nothing: there are only ours",
    "--disable-grammar-support": "nothing: that is a flag of TGI's router",
    "--tokenizer-name": "nothing: that is a flag of TGI's router",
}
#: Variables that TGI's launcher reads. Those too general to be meant for a server are left out.
_VARIABLES = (
    "REVISION",
    "NUM_SHARD",
    "QUANTIZE",
    "DTYPE",
    "KV_CACHE_DTYPE",
    "SERVED_MODEL_NAME",
    "MAX_CONCURRENT_REQUESTS",
    "MAX_BEST_OF",
    "MAX_STOP_SEQUENCES",
    "MAX_TOP_N_TOKENS",
    "MAX_INPUT_TOKENS",
    "MAX_TOTAL_TOKENS",
    "MAX_BATCH_PREFILL_TOKENS",
    "MAX_BATCH_TOTAL_TOKENS",
    "MAX_BATCH_SIZE",
)
_RENAMED = {
    "MAX_INPUT_LENGTH": "TOKENPOD_MAX_INPUT_TOKENS",
    "CUDA_MEMORY_FRACTION": "TOKENPOD_MEMORY_FRACTION",
    "SHARD_UDS_PATH": "TOKENPOD_UDS_PATH",
    "TRUST_REMOTE_CODE": "nothing: no code of a model's repository is ever run",
}


def removed_flag(name: str) -> str | None:
    """What to do instead of a flag that earlier versions had; None if they had none."""
    instead = REMOVED.get(name.removeprefix("--").replace("-", "_"))
    return f"No such option: {name}. It was removed: {instead}" if instead else None


def foreign_flag(name: str) -> str | None:
    """What a flag that we don't have is called here; None if nobody else has it either."""
    short = name if name in _VLLM or name in _TGI else name.replace("_", "-")
    whose = [server for server, known in (("vLLM", _VLLM), ("TGI", _TGI)) if short in known]
    if not whose:
        return None
    ours = _VLLM.get(short) or _TGI[short]
    return f"No such option: {name}. It is a flag of {' and '.join(whose)}; here it is {ours}"


def foreign_model(environment: Mapping[str, str], *, named: bool) -> str | None:
    """Why a start is refused that would serve another model than TGI's variable names.

    Args:
        named: whether a flag, variable or file of ours names the model.
    """
    model = environment.get("MODEL_ID")
    if not model or named:
        return None
    return f"MODEL_ID is {model}, which is TGI's variable; here it is TOKENPOD_MODEL_ID"


def foreign_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """A line for each of TGI's variables that is set, unless ours is set as well."""
    ours = {name: f"TOKENPOD_{name}" for name in _VARIABLES} | _RENAMED
    for name, other in ours.items():
        if environment.get(name) and not environment.get(other):
            yield f"{name} is set, which is TGI's variable and is not read; here it is {other}"
