"""Every setting of the server, once: flags, variables, help and docs/settings.md come from here."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, FilePath
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from tokenpod.core.formats import ABOUT, Quantize

VARIABLE_PREFIX = "TOKENPOD_"

#: Settings of earlier versions, and what to do instead. Where one is given the start is refused.
REMOVED = {"draft_tree": "drafts of a sequence are a chain now; --speculate alone says how many"}


class Group(StrEnum):
    """What a setting is about: the panels of `--help`, the tables of docs/settings.md."""

    MODEL = "Model"
    NETWORK = "Network"
    LIMITS = "Limits on requests"
    MEMORY = "Batching and memory"
    SHARDS = "Shards"
    SECURITY = "Security"
    TELEMETRY = "Telemetry and logs"
    OPERATION = "Operation"


def _setting(group: Group, default: object = None, *, derived: str = "", **limits: Any) -> Any:
    """A setting, which the docstring after it describes; `derived` says what an unset one is."""
    about: dict[str, Any] = {"group": group.value, "derived": derived}
    return Field(default, json_schema_extra=about, **limits)


_model, _network, _limit, _memory, _shard, _security, _telemetry, _operation = (
    partial(_setting, group) for group in Group
)


class Settings(BaseSettings):
    """What an operator can set, by the names of TGI's launcher wherever both have the thing."""

    model_config = SettingsConfigDict(
        env_prefix=VARIABLE_PREFIX,
        env_ignore_empty=True,
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        validate_default=False,
        defer_build=True,
    )

    model_id: str = _model("demo", min_length=1)
    """The model: `demo` (embedded in the package), a folder, or a name such as `org/name` that is
    looked up in the local Hugging Face cache. Nothing is downloaded, but with download."""
    revision: str | None = _model(derived="main", min_length=1)
    """Branch, tag or commit of a model in the cache, or of one that is downloaded."""
    served_model_name: str | None = _model(derived="model-id", min_length=1)
    """The model's name for clients; a request that names another one is NOT_FOUND."""
    download: Path | None = _model()
    """Download the model to this folder first, unless it is there: model-id is then a name on a
    Hugging Face hub, or a URL (`s3://`, `gs://`, `az://`). Without it nothing is downloaded."""
    require_manifest: bool = _model(False)
    """Refuse a model folder without SHA256SUMS, the digests of its files. Where it is there, the
    files must have these digests, whatever this says."""
    task: Literal["auto", "generate", "embed", "score", "classify"] = _model("auto")
    """What the model is for. auto: as its files show: modules.json or an encoder embed, a head of
    labels classifies, or scores if it has one label, all else generates. score makes a reranker of
    a model that was trained to answer yes or no, such as Qwen3-Reranker."""
    chat_template: str | None = _model(derived="the model's default", min_length=1)
    """Chat template: the name of another one of the model's, such as tool_use, or a file."""
    tool_parser: Literal[
        "auto",
        "none",
        "hermes",
        "mistral",
        "pythonic",
        "llama3_json",
        "qwen3_coder",
        "glm",
        "minimax",
        "deepseek",
        "deepseek_dsml",
        "kimi",
        "gemma4",
        "harmony",
    ] = _model("auto")
    """How the model writes calls of tools, which tokenpod.v1 tells from its text. auto: as its chat
    template shows."""
    reasoning_parser: Literal["auto", "none", "think", "mistral", "gemma4", "harmony"] = _model(
        "auto"
    )
    """How the model marks what it thinks before it answers, likewise. think: `<think>`; mistral:
    `[THINK]`; gemma4: `<|channel>thought`; harmony: the channel analysis."""
    generation_config: Literal["model", "none"] = _model("model")
    """What requests of tokenpod.v1 get that leave open how tokens are chosen: what the model's
    generation_config.json says, or the likeliest token. Other protocols have rules of their own."""
    config_override: str | None = _model(min_length=2)
    """Fields of the model's config.json that have other values, as a JSON object: rope, lengths. An
    object in it replaces one as a whole, but rope keeps its theta."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _model("auto")
    """Type of weights, and of the KV cache unless kv-cache-dtype says otherwise. auto: the
    checkpoint's on a GPU, float32 on a CPU. With float32 a CPU with AVX-512 leaves a checkpoint's
    weights of 16 bits as they are: results are the same, bit by bit."""
    quantize: Quantize = _model("none")
    """Format of the weights of products, made while they are loaded. {formats}; embedding, head and
    norms stay as they are. A checkpoint that is quantised needs no value: its config says how, and
    the name of a layout (gptq, awq, marlin, compressed-tensors, modelopt, fp8, bitsandbytes) is
    compared with it. Of a dense checkpoint eetq and bitsandbytes make int8, bitsandbytes-nf4 and
    bitsandbytes-fp4 int4."""
    quantize_head: bool = _model(False)
    """Make the head's weight in that format too. A head that is the embedding is then held twice,
    and read in fewer bits."""
    lora_adapters: str | None = _model(min_length=1)
    """Adapters that are loaded with the model (LoRA, prompt tuning, P-tuning or prefix tuning), as
    `NAME=PATH,NAME=PATH@REVISION`: folders in PEFT's layout, or names that are looked up in the
    local Hugging Face cache. A place without a name is its own. TGI's variable LORA_ADAPTERS means
    the same."""
    lora_fuse: bool = _model(False)
    """Fuse the one LoRA adapter that lora-adapters names into the weights while they are read:
    nothing is computed for it later, and all requests have it, whether they name it or none. Also
    for what is not served beside others: adapters of experts, DoRA of a head, whole
    modules."""
    adapter_folder: Path | None = _model()
    """Folder below which AdapterService may load adapters; each pod of a group has its own."""
    max_loaded_adapters: int = _memory(128, ge=1, le=4096)
    """Adapters that are kept in the host's memory at once, those of lora-adapters among them."""
    max_adapters: int | None = _memory(
        derived="as many as lora-adapters names, 32 at most", ge=0, le=1024
    )
    """LoRA adapters that running sequences can have at once; others wait in the host's memory.
    Their memory is taken at the start. Adapters of virtual tokens need none: 0 is fine for them."""
    max_adapter_rank: int = _memory(64, ge=1, le=512)
    """Largest rank of a LoRA adapter. Each of max-adapters takes memory for it."""
    max_adapter_heads: int = _memory(0, ge=0, le=1024)
    """Adapters among max-adapters that may bring a whole embedding or head of their own
    (modules_to_save). Memory for both is taken for each; 0: such adapters are refused."""
    lora_vocabulary: bool = _memory(False)
    """Take LoRA adapters of the embedding and the head too (target modules embed_tokens and
    lm_head). Each of max-adapters takes memory for both; without it such adapters are refused."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "int8"] = _memory("auto")
    """Type of the KV cache. auto: dtype's. fp8_e4m3: 8 bits and one scale per head, on a GPU of
    compute capability 8.9 or more; twice the tokens of bfloat16, a little less exact. int8: 8 bits
    and one scale per head and token, on a CPU."""
    deterministic: bool = _model(False)
    """Let the tokens of a request, and their log probabilities, be the same bit by bit whatever
    runs beside it, however its prompt is cut, and whether its beginning was cached. For dense
    models without quantised weights, on one GPU; 9 to 17 % slower."""
    device: Literal["auto", "cpu", "cuda"] = _model("auto")
    """Where the model runs. auto: a GPU if there is one."""
    threads: int = _model(0, ge=0)
    """CPU threads of the model. 0: one per core, less one for the front end."""

    hostname: str = _network("0.0.0.0", min_length=1)  # noqa: S104 (a pod's server is there to be reached)
    """Address to listen on."""
    port: int = _network(50051, ge=0, le=65535)
    """Port of every gRPC service. 0: any free one."""
    tgis_port: int = _network(0, ge=0, le=65535)
    """A second port of every gRPC service, for clients of TGIS, who look for 8033. 0: none."""
    loopback_port: int = _network(0, ge=0, le=65535)
    """A port of every gRPC service on 127.0.0.1 alone, in plaintext and without tokens of
    auth-token-file, for a gateway beside the server that can show none; tls-cert is needed with it.
    Whoever has a process on this machine, or in this Kubernetes pod, may call. 0: none."""
    health_port: int = _network(50052, ge=0, le=65535)
    """Port of grpc.health.v1 for probes: plaintext, without authentication. 0: none."""
    front_ends: int = _network(0, ge=0, le=64)
    """Processes that share the port and stream tokens; a client's connection stays with one of
    them. 0: one on a CPU; on a GPU one for 4 cores, 4 at most."""
    uds_path: str | None = _network(min_length=1)
    """Listen on the unix socket `<uds-path>-0` as well, once the model is ready. TGI's routers look
    for `/tmp/text-generation-server`. Who may open the file needs no token."""
    uds_group: str | None = _network(min_length=1)
    """Let this group (name or number) open the unix socket too, not its owner alone."""
    max_router_message_bytes: int = _network(256 * 1024 * 1024, ge=1024, le=2**31 - 1)
    """Bytes of one request message on the unix socket."""
    max_message_bytes: int = _network(4 * 1024 * 1024, ge=1024, le=2**31 - 1)
    """Bytes of one request message on the port."""
    keepalive_seconds: float = _network(60.0, ge=10, le=86_400)
    """Ping a client that has been silent for so long, and drop it if it does not answer."""
    max_connection_age_seconds: float = _network(0.0, ge=0, le=2_000_000)
    """Ask clients to reconnect after so long, which spreads them over new replicas; running calls
    go on. 0: never."""
    max_connection_idle_seconds: float = _network(900.0, ge=0, le=2_000_000)
    """Close a connection that has had no call for so long. 0: never."""
    max_connections: int | None = _network(
        derived="half of the file descriptors that a process may open", ge=1, le=2**30
    )
    """Connections to the port at once, front ends sharing them equally; one more is closed. The
    health port and the unix socket have no such limit."""

    unknown_fields: Literal["refuse", "ignore"] = _limit("refuse")
    """What becomes of requests of tokenpod.v1 with fields or enum values that this server does not
    know. The other protocols ignore them, as their own servers do."""
    kv_cache_events: bool = _limit(False)
    """Let clients hear what the prefix cache holds, and empty it: SubscribeKvEvents and FlushCache
    of vllm.grpc.engine, for gateways. It holds the token ids of all callers' prompts."""
    max_concurrent_requests: int | None = _limit(derived="4 times max-batch-size", ge=1)
    """Requests running and waiting; one more is refused."""
    max_queue_tokens: int | None = _limit(
        derived="as many as the KV cache holds, 131072 at least", ge=1
    )
    """Prompt tokens waiting; a request beyond is refused."""
    max_front_end_bytes: int | None = _limit(
        derived="max-concurrent-requests times max-message-bytes, 1073741824 to 8589934592",
        ge=1024**2,
    )
    """Memory that calls may hold in all front ends together: messages, prompts, answers not yet
    sent; a call beyond is refused. A message that has not arrived after half a second counts at
    max-message-bytes; such ones may take half of this memory, those of one connection an eighth."""
    text_workers: int = _limit(2, ge=1, le=64)
    """Processes of each front end that tokenise long texts and render chats."""
    text_timeout: float = _limit(30.0, gt=0, le=3600)
    """Seconds that tokenising a text or rendering a chat may take; it is killed then."""
    text_memory_bytes: int = _limit(2 * 1024**3, ge=64 * 1024**2)
    """Memory that tokenising a text or rendering a chat may take, besides the loaded tokenizer."""
    max_images: int = _limit(8, ge=0, le=1024)
    """Images of a request, where the model's are served (docs/vision.md). 0: none; then neither
    what computes them is loaded, nor are there image workers."""
    max_image_bytes: int = _limit(10 * 1024**2, ge=1024)
    """Bytes of an image's file."""
    max_image_pixels: int = _limit(32 * 1024**2, ge=1)
    """Pixels of an image, by its header, before it is decoded."""
    image_url_hosts: str | None = _limit(None, min_length=1)
    """Hosts from which images that calls name by URL may be fetched, with commas; `HOST:PORT` where
    the port is not that of http or https. Their addresses must be public. None: none is fetched."""
    image_url_timeout: float = _limit(5.0, gt=0, le=600)
    """Seconds that fetching an image may take."""
    image_workers: int | None = _limit(
        derived="2 on a CPU; on a GPU one for 3 cores, 2 to 6", ge=1, le=64
    )
    """Processes of each front end that decode images."""
    image_timeout: float = _limit(10.0, gt=0, le=3600)
    """Seconds that decoding and preparing an image may take; it is killed then."""
    image_memory_bytes: int = _limit(1024**3, ge=64 * 1024**2)
    """Memory that decoding and preparing an image may take."""
    max_input_tokens: int | None = _limit(derived="max-total-tokens less 1", ge=1)
    """Tokens of a prompt."""
    max_total_tokens: int | None = _limit(
        derived="the model's context, as far as the KV cache holds it", ge=2
    )
    """Tokens of a prompt and its output together."""
    max_client_batch_size: int = _limit(256, ge=1, le=8192)
    """Texts of a call that wants vectors, scores or labels."""
    max_best_of: int = _limit(2, ge=1)
    """Samples of a request (n, best_of)."""
    max_stop_sequences: int = _limit(4, ge=0)
    """Stop sequences of a request."""
    max_stop_sequence_bytes: int = _limit(240, ge=1)
    """Bytes of one stop sequence, in UTF-8."""
    max_top_n_tokens: int = _limit(5, ge=0, le=64)
    """Most likely tokens that a request may ask for."""
    max_logit_bias: int = _limit(1024, ge=0)
    """Entries of logit_bias and of stop_token_ids, and of allowed_token_ids and tokens of bad_words
    together."""
    max_constraint_bytes: int = _limit(256 * 1024, ge=1, le=16 * 1024**2)
    """Bytes of a constraint: a JSON schema, a regular expression, a grammar, a choice or tags; and
    of the schemas of a chat's tools together."""
    compact_json: bool = _limit(True)
    """Let constrained JSON, of a schema or of a tool's arguments, have no whitespace but a space
    behind a comma or a colon. Without it a model may indent, and waste tokens on spaces."""
    constraint_compile_timeout: float = _limit(5.0, gt=0, le=600)
    """Seconds in which a constraint must be compiled and have its first mask; else its request is
    refused."""
    constraint_mask_timeout: float = _limit(0.5, gt=0, le=60)
    """Seconds that each further mask of a constrained text may take; else that text ends."""
    constraint_workers: int = _limit(
        0,
        ge=0,
        le=64,
        derived="half of the cores, 8 at most; all but one, 16 at most, for many masks at once",
    )
    """Threads of the engine that make masks of constrained texts; 0: by the number of cores."""
    constraint_cache_bytes: int = _memory(256 * 1024**2, ge=0)
    """Memory for compiled constraints that are kept for later requests, about."""

    max_batch_size: int | None = _memory(
        derived="64 on a CPU; on a GPU as many as its memory holds well, 1024 at most",
        ge=1,
        le=65_536,
    )
    """Sequences that run at once."""
    max_batch_prefill_tokens: int | None = _memory(
        derived="4096 on a GPU, 512 on a CPU; max-batch-total-tokens at most",
        ge=1,
    )
    """Prompt tokens of one step; a longer prompt takes several. If this is not set, steps on a CPU
    keep max-gap-ms also while nobody streams."""
    max_gap_ms: float | None = _memory(derived="120 on a GPU, 100 on a CPU", ge=0, le=60_000)
    """Milliseconds that a step with prompts may take while others stream, by estimate: it has fewer
    prompt tokens then, a 64th of max-batch-prefill-tokens or 8 at least. If it takes so long
    without prompts, they may add half of that. 0: no bound. Not with batching alternate."""
    max_batch_total_tokens: int | None = _memory(derived="what memory-fraction holds", ge=2)
    """Size of the KV cache in tokens: all running requests and the prefixes kept."""
    admission: Literal["exact", "reserve", "optimistic", "past_future"] = _memory("exact")
    """Which waiting requests may run. exact: those that can never run out of memory; reserve: as
    TGI, the sum of prompts and most new tokens fits; optimistic: as vLLM, the prompt fits now;
    past_future: as LightLLM, it fits if outputs are as long as lately. Under the last two the
    request that came last makes room if memory runs out (preemption)."""
    batching: Literal["mixed", "alternate"] = _memory("mixed")
    """What a step holds. mixed: a token of every running request and pieces of prompts; alternate:
    as TGI, whole prompts by themselves while running requests pause, or tokens."""
    queue_order: Literal["arrival", "shortest"] = _memory("arrival")
    """Who is next among waiting requests of one priority. arrival: who came first; shortest: who
    has the shorter prompt, but no prompt lets more than 256 times its own tokens pass, nor more
    than 64 steps'."""
    waiting_served_ratio: float | None = _memory(derived="0.3", ge=0, le=1_000_000)
    """With batching alternate: waiting requests interrupt running ones if they are at least so many
    times as many."""
    max_waiting_tokens: int | None = _memory(derived="20", ge=0)
    """With batching alternate: after so many tokens any number of waiting requests interrupts."""
    prefix_caching: bool = _memory(True)
    """Keep keys and values of prompts, and use them for later prompts that begin alike."""
    prefix_eviction: Literal["lru", "lfu"] = _memory("lru")
    """Which of them make room for others. lru: those that were used longest ago; lfu: those that
    few requests have used."""
    image_cache_bytes: int = _memory(256 * 1024**2, ge=0)
    """Host memory for rows of images that were computed, so that an image that comes again, as in
    each turn of a chat, is not computed again."""
    host_kv_bytes: int = _memory(0, ge=0)
    """Memory of this pod's host, all ranks together, for keys and values that the KV cache has no
    room for: prefixes that it forgets, and requests that made room for others. 0: none."""
    host_kv_least_tokens: int = _memory(512, ge=1)
    """Fewer tokens than this are computed again, and not copied from the host's memory: where
    copying takes as long as computing."""
    preemption: Literal["auto", "vllm", "recompute", "swap"] = _memory("auto")
    """What becomes of a request that makes room, with host-kv-bytes. swap: its keys and values go
    to the host's memory, and come back; recompute: they are computed again; auto: they are swapped
    from host-kv-least-tokens on; vllm: as vLLM 0.5, they are swapped if several samples may still
    run, and nobody joins before they are back. Whatever finds no room there is computed again."""
    speculate: int = _memory(0, ge=0, le=32)
    """Tokens that a step may draft for a sequence, from what its text has repeated (n-grams) or by
    draft-model: it keeps those that it would have generated. Tokens stay the same. 0: none."""
    draft_model: str | None = _memory(None)
    """A small model, an EAGLE-3 head or Medusa heads that draft instead of n-grams: a folder, or a
    name that is in the local Hugging Face cache; or mtp, the layer of the served model's own
    checkpoint that predicts further tokens. A model's vocabulary must be the served one's; each
    rank holds it whole."""
    router_lease: float = _operation(30.0, ge=1, le=86_400)
    """Seconds after which a router's batch that no call names is released; not counted while a
    Prefill runs."""
    memory_fraction: float = _memory(0.9, gt=0, lt=1)
    """Part of the memory that is free after loading which the KV cache may take."""

    num_shard: int = _shard(1, ge=1, le=64)
    """Ranks that this pod runs, each on a GPU of its own: the model is divided between them."""
    num_nodes: int = _shard(1, ge=1, le=1024)
    """Pods that share one model, with as many ranks each."""
    node_rank: int = _shard(0, ge=0, le=1023)
    """Which of these pods this one is. Pod 0 leads."""
    master_addr: str | None = _shard(min_length=1)
    """Where the other pods reach pod 0: a name or an address."""
    master_port: int = _shard(29500, ge=1, le=65535)
    """Port of pod 0 where ranks meet for collectives."""
    shard_port: int = _shard(50053, ge=1, le=65535)
    """Port of pod 0 that the plans of all steps come from."""
    shard_tls_cert: FilePath | None = _shard()
    """Certificate chain (PEM) that pods show each other for plans; turns mutual TLS on."""
    shard_tls_key: FilePath | None = _shard()
    """Private key of shard-tls-cert (PEM)."""
    shard_tls_ca: FilePath | None = _shard()
    """Authorities that sign the pods' certificates (PEM)."""

    tls_cert: FilePath | None = _security()
    """Certificate chain of the server (PEM); turns TLS on."""
    tls_key: FilePath | None = _security()
    """Private key of tls-cert (PEM)."""
    tls_client_ca: FilePath | None = _security()
    """Require client certificates signed by these authorities (PEM)."""
    auth_token_file: FilePath | None = _security()
    """Accept only calls with one of these bearer tokens, one per line; read again on change. While
    the file is empty or can't be read, the last tokens count for 60 s."""

    adapter_token_file: FilePath | None = _security()
    """Switch AdapterService of tokenpod.v1 on, for calls with one of these bearer tokens, one per
    line; read again on change, as auth-token-file. Tokens of auth-token-file do not count there."""

    admin_token_file: FilePath | None = _security()
    """Switch AdminService of tokenpod.admin.v1 on (status, log level, stacks, profiles), for calls
    with one of these bearer tokens, one per line; read again on change, as auth-token-file. Tokens
    of the other files do not count there."""

    metrics_port: int = _telemetry(0, ge=0, le=65535)
    """Port from which Prometheus fetches metrics (HTTP, `/metrics`; customarily 9464): plaintext,
    without authentication, and for nothing else. 0: none."""
    metrics_names: str | None = _telemetry(min_length=1)
    """Names of other servers under which the metrics port shows the same numbers as well: `vllm`,
    which llm-d's picker reads too, `tgi`, or both with a comma."""
    otlp_endpoint: str | None = _telemetry(pattern=r"^https?://[^/\s]+/?$")
    """OTLP collector (gRPC) for traces and metrics, such as `http://collector:4317`."""
    otlp_service_name: str = _telemetry("tokenpod", min_length=1)
    """service.name of what is exported."""
    otlp_sample_ratio: float = _telemetry(1.0, ge=0, le=1)
    """Part of the traces begun here that is recorded."""
    access_log_ratio: float = _telemetry(1.0, ge=0, le=1)
    """Part of the calls that have a line in the log when they end: rpc, caller, request and trace
    id, status and reason, times, tokens; never a text. Calls that fail by the server's doing always
    have one, unless this is 0, for no such lines."""
    log_level: Literal["debug", "info", "warning", "error"] = _telemetry("info")
    """Least severity that is logged."""
    json_output: bool = _telemetry(False)
    """Log JSON, one object a line."""

    config: FilePath | None = _operation()
    """YAML file with settings by the names of their flags, without dashes before them. A flag or a
    variable wins over it."""
    start_timeout: float = _operation(600.0, gt=0)
    """Seconds to load and warm the model up; then the start fails."""
    stall_timeout: float = _operation(40.0, gt=0, le=86_400)
    """Seconds without a sign of the engine, or 200 of its usual steps, after which running calls
    fail and the process ends with status 1, without a drain; a group forms again. The engine says
    nothing while it computes a step: allow for the longest."""
    lame_duck_seconds: float = _operation(5.0, ge=0, le=3600)
    """Go on serving for so long after SIGTERM, already not ready: endpoints take time to hear.
    After Ctrl-C the server ends as soon as nothing runs."""
    graceful_termination_timeout: float = _operation(90.0, ge=0, le=86_400)
    """Seconds that running requests get to finish after that."""


def group_of(field: FieldInfo) -> str:
    """What a setting is about: the value of a `Group`."""
    return str(_about(field, "group"))


@functools.cache
def descriptions() -> dict[str, str]:
    """What each setting means, in one line: its docstring, with what `core.formats` says.

    Read when help or documentation asks for it. pydantic would read them whenever a server starts
    (`use_attribute_docstrings`), for 40 ms.
    """
    (settings,) = ast.parse(inspect.getsource(Settings)).body
    assert isinstance(settings, ast.ClassDef)
    formats = "; ".join(f"{name}: {about}" for name, about in ABOUT.items())
    return {
        field.target.id: " ".join(text.value.value.split()).replace("{formats}", formats)
        for field, text in itertools.pairwise(settings.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def default_text(field: FieldInfo) -> str:
    """A setting's default as help and documentation show it; "" if it is just unset."""
    derived = _about(field, "derived")
    if derived or field.default is None:
        return derived
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    if isinstance(field.default, float):
        return f"{field.default:g}"
    return str(field.default)


def _about(field: FieldInfo, name: str) -> str:
    about = field.json_schema_extra
    return str(about[name]) if isinstance(about, dict) else ""
