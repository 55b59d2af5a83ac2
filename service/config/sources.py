"""Where settings come from, and what they come to on this machine.

A flag wins over its variable (`--max-best-of` over `TOKENPOD_MAX_BEST_OF`), a variable over the
file that --config names, that over the default. This is the only module that reads the
environment; settings.py lists the settings.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource

from tokenpod.service.config.rules import contradictions, flag, named_adapters
from tokenpod.service.config.settings import REMOVED, VARIABLE_PREFIX, Settings

#: Variables of the client commands, which are no settings of the server.
CLIENT_VARIABLES = frozenset({"TOKENPOD_TOKEN", "TOKENPOD_ADDRESS"})
#: What launchers of distributed programs set for each rank, by our setting's name.
LAUNCHER_VARIABLES = {
    "num_nodes": "WORLD_SIZE",
    "node_rank": "RANK",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}

#: What TGI's launcher reads and has no other meaning, by our setting's name.
TGI_VARIABLES = {"lora_adapters": "LORA_ADAPTERS"}

#: Kubernetes sets variables in every pod for a Service named `tokenpod`: TOKENPOD_PORT is a URL.
_SERVICE_LINK = re.compile(r"^(tcp|udp|sctp)://")
_SERVICE_VARIABLE = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT(_\d+_(TCP|UDP|SCTP).*)?$")

#: Where a process may open more descriptors than that, it is no limit to think of.
_MANY_DESCRIPTORS = 1 << 20


#: Requests that are taken, running and waiting, in multiples of those that run at once.
_BATCHES_TAKEN = 4
#: Slots for adapters, where their number is not set.
_MOST_USUAL_ADAPTERS = 32
#: Prompt tokens that may wait however small the KV cache is.
_LEAST_QUEUE_TOKENS = 131_072
#: Memory that calls may hold however few are taken.
_LEAST_FRONT_END_BYTES = 1024**3


class SettingsError(ValueError):
    """Settings that are wrong or don't go together; the text has a line for each fault."""


class _Environment(EnvSettingsSource):
    """The environment, less the addresses that Kubernetes puts there under our names."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        value, key, is_complex = super().get_field_value(field, field_name)
        if value is None and field_name in TGI_VARIABLES:
            value = os.environ.get(TGI_VARIABLES[field_name]) or None
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


class _File(PydanticBaseSettingsSource):
    """What the file of --config says. Raises SettingsError if it can't be read."""

    def __init__(self, settings_cls: type[BaseSettings], path: object) -> None:
        super().__init__(settings_cls)
        self._values = _read(Path(str(path))) if path else {}

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """The file's word on one setting; None: it has none."""
        return self._values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        """Every setting that is in it."""
        return self._values


def _read(path: Path) -> dict[str, Any]:
    """The settings of a YAML file by their names. Raises SettingsError."""
    # Only those who have such a file wait for it.
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        text = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise SettingsError(f"--config is {path}: it can't be read ({text})") from None
    if not isinstance(found, dict):
        raise SettingsError(f"--config is {path}: it must have settings by name, as port: 50051")
    values = {str(name).replace("-", "_"): value for name, value in found.items()}
    for name in values.keys() & REMOVED.keys():
        raise SettingsError(
            f"--config is {path}: {name.replace('_', '-')} was removed: {REMOVED[name]}"
        )
    known = ServerSettings.model_fields.keys() - {"config"}
    if unknown := [name for name in found if str(name).replace("-", "_") not in known]:
        raise SettingsError(f"--config is {path}: there is no setting {unknown[0]}")
    return {name: value for name, value in values.items() if value is not None}


class ServerSettings(Settings):
    """How one server is run. Immutable; raises pydantic's ValidationError for what can't be."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, the environment, a file; no .env file of whatever folder we are started in."""
        own = _Environment(settings_cls)
        given = {**own(), **init_settings()}
        file = _File(settings_cls, given.get("config"))
        launcher = _Launcher(settings_cls, {**file(), **given})
        return init_settings, own, file, launcher

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
    def served_name(self) -> str:
        """The model's name for clients."""
        return self.served_model_name or self.model_id

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
    def resolved_adapters(self) -> int:
        """Adapters that running sequences can have at once."""
        if self.lora_fuse:
            return 0
        if self.max_adapters is not None:
            return self.max_adapters
        return min(len(named_adapters(self.lora_adapters)), _MOST_USUAL_ADAPTERS)

    @property
    def resolved_concurrent_requests(self) -> int:
        """Requests running and waiting: while one batch runs, three more may wait."""
        return self.max_concurrent_requests or _BATCHES_TAKEN * self.resolved_batch_size

    @property
    def resolved_front_end_bytes(self) -> int:
        """Bytes of the front ends' memory that calls may hold together."""
        messages = self.resolved_concurrent_requests * self.max_message_bytes
        return self.max_front_end_bytes or max(messages, _LEAST_FRONT_END_BYTES)

    def resolved_queue_tokens(self, slots: int) -> int:
        """Prompt tokens waiting, with a KV cache of so many: what waits fits into it once."""
        return self.max_queue_tokens or max(slots, _LEAST_QUEUE_TOKENS)

    @property
    def resolved_prefill_tokens(self) -> int:
        """Prompt tokens of one step; fewer if the engine finds that they take too long."""
        if self.max_batch_prefill_tokens is not None:
            return self.max_batch_prefill_tokens
        usual = 512 if self.resolved_device == "cpu" else 4096
        return min(usual, self.max_batch_total_tokens or usual)

    @property
    def short_prompt_steps(self) -> bool:
        """Whether the engine may choose smaller steps. `alternate` computes prompts whole."""
        chosen = self.max_batch_prefill_tokens is not None or self.batching == "alternate"
        return self.resolved_device == "cpu" and not chosen

    @property
    def resolved_waiting_served_ratio(self) -> float:
        """Waiting requests per running one that `alternate` asks for: TGI's launcher's default."""
        return 0.3 if self.waiting_served_ratio is None else self.waiting_served_ratio

    @property
    def resolved_max_waiting_tokens(self) -> int:
        """Decode steps after which `alternate` asks for no such number: TGI's default."""
        return 20 if self.max_waiting_tokens is None else self.max_waiting_tokens

    @property
    def most_whole_prompt(self) -> int | None:
        """Tokens of a prompt that steps can't divide; None: steps divide prompts."""
        return self.resolved_prefill_tokens if self.batching == "alternate" else None

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
    def tgis_address(self) -> str | None:
        """Where every service listens as well; None: nowhere."""
        return f"{host_of(self.hostname)}:{self.tgis_port}" if self.tgis_port else None

    @property
    def health_address(self) -> str | None:
        """Where the health port listens; None: nowhere."""
        return f"{host_of(self.hostname)}:{self.health_port}" if self.health_port else None

    @property
    def metrics_address(self) -> str | None:
        """Where Prometheus fetches metrics; None: nowhere."""
        return f"{host_of(self.hostname)}:{self.metrics_port}" if self.metrics_port else None

    @property
    def resolved_metrics_names(self) -> frozenset[str]:
        """Of which other servers the metrics port shows the names."""
        return frozenset(name.strip() for name in (self.metrics_names or "").split(",") if name)

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
    for name, instead in REMOVED.items():
        if value := os.environ.get(variable(name)):
            raise SettingsError(f"{variable(name)} is {value}: it was removed: {instead}")
    try:
        return ServerSettings(**flags)  # type: ignore[arg-type]
    except ValidationError as error:
        path = flags.get("config") or os.environ.get(variable("config"))
        file = _read(Path(str(path))) if path and Path(str(path)).is_file() else {}
        faults = [_fault(e["loc"], e["msg"], e["input"], flags, file) for e in error.errors()]
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


def _fault(
    loc: tuple[int | str, ...],
    text: str,
    value: object,
    flags: Mapping[str, object],
    file: Mapping[str, object],
) -> str:
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
    if name in file and variable(name) not in os.environ:
        return f"{name.replace('_', '-')} in --config is {value}: {text}"
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
