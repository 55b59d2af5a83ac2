"""Where settings come from: flags, the environment, a file.

A flag wins over its variable (`--max-best-of` over `TOKENPOD_MAX_BEST_OF`), a variable over the
file that --config names, that over the default. No module outside of this
folder reads the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource

from tokenpod.service.config.resolved import ResolvedSettings
from tokenpod.service.config.rules import contradictions, flag
from tokenpod.service.config.settings import REMOVED, VARIABLE_PREFIX

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


class ServerSettings(ResolvedSettings):
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
