"""Every setting of the server, once: flags, variables, help and docs/settings.md come from here.

A flag wins over its variable (`--max-best-of` over `TOKENPOD_MAX_BEST_OF`), a variable over the
default. Names are those of TGI's launcher wherever both have the thing. This is the only module
that reads the environment.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Mapping
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, FilePath, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from tokenpod.core.formats import ABOUT, Quantize
from tokenpod.service.config_rules import contradictions, flag

VARIABLE_PREFIX = "TOKENPOD_"
#: Variables of the client commands, which are no settings of the server.
CLIENT_VARIABLES = frozenset({"TOKENPOD_TOKEN"})
#: What launchers of distributed programs set for each rank, by our setting's name.
LAUNCHER_VARIABLES = {
    "num_nodes": "WORLD_SIZE",
    "node_rank": "RANK",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}

#: Kubernetes sets variables in every pod for a Service named `tokenpod`: TOKENPOD_PORT is a URL.
_SERVICE_LINK = re.compile(r"^(tcp|udp|sctp)://")
_SERVICE_VARIABLE = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT(_\d+_(TCP|UDP|SCTP).*)?$")

#: Where a process may open more descriptors than that, it is no limit to think of.
_MANY_DESCRIPTORS = 1 << 20


#: Requests that are taken, running and waiting, in multiples of those that run at once.
_BATCHES_TAKEN = 4
#: Prompt tokens that may wait however small the KV cache is.
_LEAST_QUEUE_TOKENS = 131_072
#: Memory that calls may hold however few are taken.
_LEAST_FRONT_END_BYTES = 1024**3


class SettingsError(ValueError):
    """Settings that are wrong or don't go together; the text has a line for each fault."""


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


def _setting(
    default: object, group: Group, description: str, *, derived: str = "", **limits: Any
) -> Any:
    """A field; `derived` says what an unset one comes to."""
    about: dict[str, Any] = {"group": group.value, "derived": derived}
    return Field(default, description=description, json_schema_extra=about, **limits)


class _Environment(EnvSettingsSource):
    """The environment, less the addresses that Kubernetes puts there under our names."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        value, key, is_complex = super().get_field_value(field, field_name)
        if isinstance(value, str) and _SERVICE_LINK.match(value):
            return None, key, is_complex
        return value, key, is_complex


class _Launcher(PydanticBaseSettingsSource):
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as launchers set them for a rank.

    They place a pod that has one rank, unless a setting of ours says where it belongs.
    """

    _PLACES = frozenset({"num_shard", "num_nodes", "node_rank"})

    def __init__(self, settings_cls: type[BaseSettings], given: Mapping[str, object]) -> None:
        super().__init__(settings_cls)
        self._placed = bool(self._PLACES & given.keys())

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """The launcher's word on one setting; None: it has none."""
        name = LAUNCHER_VARIABLES.get(field_name, "")
        unwanted = self._placed and field_name in self._PLACES
        return None if unwanted else os.environ.get(name) or None, field_name, False

    def __call__(self) -> dict[str, Any]:
        """Every setting that a launcher has made."""
        values = {name: self.get_field_value(FieldInfo(), name)[0] for name in LAUNCHER_VARIABLES}
        return {name: value for name, value in values.items() if value is not None}


class ServerSettings(BaseSettings):
    """How one server is run. Immutable; raises pydantic's ValidationError for what can't be."""

    model_config = SettingsConfigDict(
        env_prefix=VARIABLE_PREFIX,
        env_ignore_empty=True,
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        validate_default=False,
    )

    model_id: str = _setting(
        "demo",
        Group.MODEL,
        "The model: `demo` (embedded in the package), a folder, or a name such as `org/name` that"
        " is looked up in the local Hugging Face cache. Nothing is downloaded.",
        min_length=1,
    )
    revision: str | None = _setting(
        None,
        Group.MODEL,
        "Branch, tag or commit of a model in the cache.",
        derived="main",
        min_length=1,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _setting(
        "auto",
        Group.MODEL,
        "Type of weights, and of the KV cache unless kv-cache-dtype says otherwise. auto: the"
        " checkpoint's on a GPU, float32 on a CPU.",
    )
    quantize: Quantize = _setting(
        "none",
        Group.MODEL,
        "Format of the weights of products, made while they are loaded. "
        + "; ".join(f"{name}: {about}" for name, about in ABOUT.items())
        + "; embedding, head and norms stay as they are. Not for mixtures of experts.",
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = _setting(
        "auto",
        Group.MEMORY,
        "Type of the KV cache. auto: dtype's. fp8_e4m3: 8 bits and one scale per head, on a GPU of"
        " compute capability 8.9 or more; twice the tokens of bfloat16, a little less exact.",
    )
    device: Literal["auto", "cpu", "cuda"] = _setting(
        "auto", Group.MODEL, "Where the model runs. auto: a GPU if there is one."
    )
    threads: int = _setting(
        0,
        Group.MODEL,
        "CPU threads of the model. 0: one per core, less one for the front end.",
        ge=0,
    )

    hostname: str = _setting(
        "0.0.0.0",  # noqa: S104 (a server in a pod is there to be reached)
        Group.NETWORK,
        "Address to listen on.",
        min_length=1,
    )
    port: int = _setting(
        50051, Group.NETWORK, "Port of every gRPC service. 0: any free one.", ge=0, le=65535
    )
    health_port: int = _setting(
        50052,
        Group.NETWORK,
        "Port of grpc.health.v1 for probes: plaintext, without authentication. 0: none.",
        ge=0,
        le=65535,
    )
    front_ends: int = _setting(
        0,
        Group.NETWORK,
        "Processes that share the port and stream tokens; a client's connection stays with one of"
        " them. 0: one on a CPU; on a GPU one for 4 cores, 4 at most.",
        ge=0,
        le=64,
    )
    uds_path: str | None = _setting(
        None,
        Group.NETWORK,
        "Listen on the unix socket `<uds-path>-0` as well, once the model is ready. TGI's routers"
        " look for `/tmp/text-generation-server`. Who may open the file needs no token.",
        min_length=1,
    )
    uds_group: str | None = _setting(
        None,
        Group.NETWORK,
        "Let this group (name or number) open the unix socket too, not its owner alone.",
        min_length=1,
    )
    max_router_message_bytes: int = _setting(
        256 * 1024 * 1024,
        Group.NETWORK,
        "Bytes of one request message on the unix socket.",
        ge=1024,
        le=2**31 - 1,
    )
    max_message_bytes: int = _setting(
        4 * 1024 * 1024,
        Group.NETWORK,
        "Bytes of one request message on the port.",
        ge=1024,
        le=2**31 - 1,
    )
    keepalive_seconds: float = _setting(
        60.0,
        Group.NETWORK,
        "Ping a client that has been silent for so long, and drop it if it does not answer.",
        ge=10,
        le=86_400,
    )
    max_connection_age_seconds: float = _setting(
        0.0,
        Group.NETWORK,
        "Ask clients to reconnect after so long, which spreads them over new replicas; running"
        " calls go on. 0: never.",
        ge=0,
        le=2_000_000,
    )

    max_connection_idle_seconds: float = _setting(
        900.0,
        Group.NETWORK,
        "Close a connection that has had no call for so long. 0: never.",
        ge=0,
        le=2_000_000,
    )
    max_connections: int | None = _setting(
        None,
        Group.NETWORK,
        "Connections to the port at once, front ends sharing them equally; one more is closed. The"
        " health port and the unix socket have no such limit.",
        derived="half of the file descriptors that a process may open",
        ge=1,
        le=2**30,
    )

    max_concurrent_requests: int | None = _setting(
        None,
        Group.LIMITS,
        "Requests running and waiting; one more is refused.",
        derived="4 times max-batch-size",
        ge=1,
    )
    max_queue_tokens: int | None = _setting(
        None,
        Group.LIMITS,
        "Prompt tokens waiting; a request beyond is refused.",
        derived="as many as the KV cache holds, 131072 at least",
        ge=1,
    )
    max_front_end_bytes: int | None = _setting(
        None,
        Group.LIMITS,
        "Memory that calls may hold in all front ends together: messages, which count at"
        " max-message-bytes until they are there, prompts, answers not yet sent; a call beyond is"
        " refused.",
        derived="max-concurrent-requests times max-message-bytes, 1073741824 at least",
        ge=1024**2,
    )
    text_workers: int = _setting(
        2,
        Group.LIMITS,
        "Processes of each front end that tokenise long texts and render chats.",
        ge=1,
        le=64,
    )
    text_timeout: float = _setting(
        30.0,
        Group.LIMITS,
        "Seconds that tokenising a text or rendering a chat may take; it is killed then.",
        gt=0,
        le=3600,
    )
    text_memory_bytes: int = _setting(
        2 * 1024**3,
        Group.LIMITS,
        "Memory that tokenising a text or rendering a chat may take, besides the loaded tokenizer.",
        ge=64 * 1024**2,
    )
    max_input_tokens: int | None = _setting(
        None,
        Group.LIMITS,
        "Tokens of a prompt.",
        derived="max-total-tokens less 1",
        ge=1,
    )
    max_total_tokens: int | None = _setting(
        None,
        Group.LIMITS,
        "Tokens of a prompt and its output together.",
        derived="the model's context, as far as the KV cache holds it",
        ge=2,
    )
    max_best_of: int = _setting(2, Group.LIMITS, "Samples of a request (n, best_of).", ge=1)
    max_stop_sequences: int = _setting(4, Group.LIMITS, "Stop sequences of a request.", ge=0)
    max_stop_sequence_bytes: int = _setting(
        240, Group.LIMITS, "Bytes of one stop sequence, in UTF-8.", ge=1
    )
    max_top_n_tokens: int = _setting(
        5, Group.LIMITS, "Most likely tokens that a request may ask for.", ge=0, le=64
    )
    max_logit_bias: int = _setting(
        1024, Group.LIMITS, "Entries of logit_bias and of stop_token_ids.", ge=0
    )

    max_batch_size: int | None = _setting(
        None,
        Group.MEMORY,
        "Sequences that run at once.",
        derived="64 on a CPU, 512 on a GPU",
        ge=1,
        le=65_536,
    )
    max_batch_prefill_tokens: int | None = _setting(
        None,
        Group.MEMORY,
        "Prompt tokens of one step; a longer prompt takes several.",
        derived="512 on a CPU, 4096 on a GPU, max-batch-total-tokens at most",
        ge=1,
    )
    max_batch_total_tokens: int | None = _setting(
        None,
        Group.MEMORY,
        "Size of the KV cache in tokens: all running requests and the prefixes kept.",
        derived="what memory-fraction holds",
        ge=2,
    )
    prefix_caching: bool = _setting(
        True,
        Group.MEMORY,
        "Keep keys and values of prompts, and use them for later prompts that begin alike.",
    )
    router_lease: float = _setting(
        30.0,
        Group.OPERATION,
        "Seconds after which a router's batch that no call names is released; not counted while a"
        " Prefill runs.",
        ge=1,
        le=86_400,
    )
    memory_fraction: float = _setting(
        0.9,
        Group.MEMORY,
        "Part of the memory that is free after loading which the KV cache may take.",
        gt=0,
        lt=1,
    )

    num_shard: int = _setting(
        1,
        Group.SHARDS,
        "Ranks that this pod runs, each on a GPU of its own: the model is divided between them.",
        ge=1,
        le=64,
    )
    num_nodes: int = _setting(
        1, Group.SHARDS, "Pods that share one model, with as many ranks each.", ge=1, le=1024
    )
    node_rank: int = _setting(
        0, Group.SHARDS, "Which of these pods this one is. Pod 0 leads.", ge=0, le=1023
    )
    master_addr: str | None = _setting(
        None, Group.SHARDS, "Where the other pods reach pod 0: a name or an address.", min_length=1
    )
    master_port: int = _setting(
        29500, Group.SHARDS, "Port of pod 0 where ranks meet for collectives.", ge=1, le=65535
    )
    shard_port: int = _setting(
        50053, Group.SHARDS, "Port of pod 0 that the plans of all steps come from.", ge=1, le=65535
    )
    shard_tls_cert: FilePath | None = _setting(
        None,
        Group.SHARDS,
        "Certificate chain (PEM) that pods show each other for plans; turns mutual TLS on.",
    )
    shard_tls_key: FilePath | None = _setting(
        None, Group.SHARDS, "Private key of shard-tls-cert (PEM)."
    )
    shard_tls_ca: FilePath | None = _setting(
        None, Group.SHARDS, "Authorities that sign the pods' certificates (PEM)."
    )

    tls_cert: FilePath | None = _setting(
        None, Group.SECURITY, "Certificate chain of the server (PEM); turns TLS on."
    )
    tls_key: FilePath | None = _setting(None, Group.SECURITY, "Private key of tls-cert (PEM).")
    tls_client_ca: FilePath | None = _setting(
        None, Group.SECURITY, "Require client certificates signed by these authorities (PEM)."
    )
    auth_token_file: FilePath | None = _setting(
        None,
        Group.SECURITY,
        "Accept only calls with one of these bearer tokens, one per line; read again on change.",
    )

    otlp_endpoint: str | None = _setting(
        None,
        Group.TELEMETRY,
        "OTLP collector (gRPC) for traces and metrics, such as `http://collector:4317`.",
        pattern=r"^https?://[^/\s]+/?$",
    )
    otlp_service_name: str = _setting(
        "tokenpod", Group.TELEMETRY, "service.name of what is exported.", min_length=1
    )
    otlp_sample_ratio: float = _setting(
        1.0, Group.TELEMETRY, "Part of the traces begun here that is recorded.", ge=0, le=1
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info", Group.TELEMETRY, "Least severity that is logged."
    )
    json_output: bool = _setting(False, Group.TELEMETRY, "Log JSON, one object a line.")

    start_timeout: float = _setting(
        600.0, Group.OPERATION, "Seconds to load and warm the model up; then the start fails.", gt=0
    )
    stall_timeout: float = _setting(
        40.0,
        Group.OPERATION,
        "Seconds without a sign of the engine, or 200 of its usual steps, after which running calls"
        " fail and the process ends with status 1, without a drain; a group forms again. The engine"
        " says nothing while it computes a step: allow for the longest.",
        gt=0,
        le=86_400,
    )
    lame_duck_seconds: float = _setting(
        5.0,
        Group.OPERATION,
        "Go on serving for so long after SIGTERM, already not ready: endpoints take time to hear.",
        ge=0,
        le=3600,
    )
    graceful_termination_timeout: float = _setting(
        90.0,
        Group.OPERATION,
        "Seconds that running requests get to finish after that.",
        ge=0,
        le=86_400,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, then the environment; no .env file of whatever folder we are started in."""
        own = _Environment(settings_cls)
        return init_settings, own, _Launcher(settings_cls, {**own(), **init_settings()})

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        for fault in contradictions(self):
            raise ValueError(fault)
        return self

    @property
    def resolved_device(self) -> Literal["cpu", "cuda"]:
        """`device`, with `auto` decided by what this machine and the installed torch have."""
        if self.device == "auto":
            return "cuda" if _has_gpu() and _torch_has_cuda() else "cpu"
        return self.device

    @property
    def resolved_dtype(self) -> str | None:
        """Name of the dtype; None: the checkpoint's own."""
        if self.dtype == "auto":
            return "float32" if self.resolved_device == "cpu" else None
        return self.dtype

    @property
    def resolved_batch_size(self) -> int:
        """Sequences that run at once."""
        return self.max_batch_size or (64 if self.resolved_device == "cpu" else 512)

    @property
    def resolved_concurrent_requests(self) -> int:
        """Requests running and waiting: while one batch runs, three more may wait."""
        return self.max_concurrent_requests or _BATCHES_TAKEN * self.resolved_batch_size

    @property
    def resolved_front_end_bytes(self) -> int:
        """What calls may hold of the front ends' memory."""
        messages = self.resolved_concurrent_requests * self.max_message_bytes
        return self.max_front_end_bytes or max(messages, _LEAST_FRONT_END_BYTES)

    def resolved_queue_tokens(self, slots: int) -> int:
        """Prompt tokens waiting, with a KV cache of so many: what waits fits into it once."""
        return self.max_queue_tokens or max(slots, _LEAST_QUEUE_TOKENS)

    @property
    def resolved_prefill_tokens(self) -> int:
        """Prompt tokens of one step."""
        if self.max_batch_prefill_tokens is not None:
            return self.max_batch_prefill_tokens
        usual = 512 if self.resolved_device == "cpu" else 4096
        return min(usual, self.max_batch_total_tokens or usual)

    @property
    def resolved_front_ends(self) -> int:
        """Processes that share the port. Only Linux spreads connections over them."""
        if not self.leads:
            # A follower streams nothing.
            return 1
        if self.front_ends or self.resolved_device == "cpu" or sys.platform != "linux":
            return self.front_ends or 1
        return min(max(len(os.sched_getaffinity(0)) // 4, 1), 4)

    @property
    def resolved_max_connections(self) -> int:
        """Connections to the port at once, of all front ends together."""
        if self.max_connections is not None:
            return self.max_connections
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        known = most if 0 < most < _MANY_DESCRIPTORS else _MANY_DESCRIPTORS
        return max(known // 2, 1)

    @property
    def connections_per_front_end(self) -> int:
        """What each front end takes of them."""
        return max(self.resolved_max_connections // self.resolved_front_ends, 1)

    @property
    def address(self) -> str:
        """Where every service listens, as gRPC writes it."""
        return f"{host_of(self.hostname)}:{self.port}"

    @property
    def health_address(self) -> str | None:
        """Where the health port listens; None: nowhere."""
        return f"{host_of(self.hostname)}:{self.health_port}" if self.health_port else None

    @property
    def socket_path(self) -> str | None:
        """The unix socket's path, by this pod's first rank; None: there is none."""
        return f"{self.uds_path}-{self.first_rank}" if self.uds_path else None

    @property
    def world(self) -> int:
        """Ranks of the whole group."""
        return self.num_nodes * self.num_shard

    @property
    def leads(self) -> bool:
        """Whether rank 0 is in this pod."""
        return self.node_rank == 0

    @property
    def first_rank(self) -> int:
        """The first of this pod's ranks."""
        return self.node_rank * self.num_shard


def variable(name: str) -> str:
    """`max_best_of` as it is written in the environment."""
    return f"{VARIABLE_PREFIX}{name.upper()}"


def load_settings(**flags: object) -> ServerSettings:
    """The settings of these flags, the environment and the defaults. Raises SettingsError."""
    try:
        return ServerSettings(**flags)  # type: ignore[arg-type]
    except ValidationError as error:
        faults = [_fault(e["loc"], e["msg"], e["input"], flags) for e in error.errors()]
        raise SettingsError("\n".join(faults)) from None


def unknown_variables() -> list[str]:
    """TOKENPOD_* variables that are set and mean nothing: probably misspelt."""
    known = {variable(name) for name in ServerSettings.model_fields} | CLIENT_VARIABLES
    ours = (name for name in os.environ if name.upper().startswith(VARIABLE_PREFIX))
    return sorted(n for n in ours if n.upper() not in known and not _SERVICE_VARIABLE.search(n))


def hub_cache() -> Path:
    """The folder of models that Hugging Face's tools have downloaded; it need not exist."""
    home = (
        os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME", "~/.cache") + "/huggingface"
    )
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def _fault(loc: tuple[int | str, ...], text: str, value: object, flags: dict[str, object]) -> str:
    """One of pydantic's complaints in our words: name, value, limit."""
    text = text.removeprefix("Value error, ")
    if not loc:
        return text
    name = str(loc[0])
    text = text.replace("Input should", "it should").replace("String should", "it should")
    if text.startswith("Path does not point to a file"):
        text = "there is no such file"
    if name == "otlp_endpoint":
        text = "it should be a URL such as http://collector:4317"
    if name in flags:
        return f"{flag(name)} is {value}: {text}"
    launchers = variable(name) not in os.environ and LAUNCHER_VARIABLES.get(name)
    return f"{launchers or variable(name)} is {value}: {text}"


def host_of(hostname: str) -> str:
    """A host as it stands before a port."""
    return f"[{hostname}]" if ":" in hostname and not hostname.startswith("[") else hostname


def _has_gpu() -> bool:
    """Whether this process may use an NVIDIA GPU, without importing torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    return any(re.fullmatch(r"nvidia\d+", device.name) for device in Path("/dev").glob("nvidia*"))


def _torch_has_cuda() -> bool:
    """Whether the installed torch was built for CUDA, read from its files: importing it is slow."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    return re.search(r"^cuda\b[^=\n]*= *['\"]", text, re.MULTILINE) is not None
