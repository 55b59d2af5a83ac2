"""What settings come to on this machine: what is not set is derived from what is."""

from __future__ import annotations

import os
import re
import resource
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from tokenpod.service.config.settings import Settings

#: Of an adapter's name, in UTF-8.
MOST_ADAPTER_NAME_BYTES = 256
#: Where a process may open more descriptors than that, it is no limit to think of.
_MANY_DESCRIPTORS = 1 << 20


#: Requests that are taken, running and waiting, in multiples of those that run at once.
_BATCHES_TAKEN = 4
#: Slots for adapters, where their number is not set.
_MOST_USUAL_ADAPTERS = 32
#: Prompt tokens that may wait however small the KV cache is.
_LEAST_QUEUE_TOKENS = 131_072
#: Memory that calls may hold however few are taken, and however many, unless somebody says so.
_LEAST_FRONT_END_BYTES = 1024**3
_MOST_FRONT_END_BYTES = 8 * 1024**3


class ResolvedSettings(Settings):
    """Settings, and what each comes to that need not be set."""

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
        """Sequences that run at once; fewer if the engine finds that memory lacks for so many."""
        return self.max_batch_size or (64 if self.resolved_device == "cpu" else 1024)

    @property
    def fewer_rows(self) -> bool:
        """Whether the engine may let fewer run at once."""
        return self.resolved_device == "cuda" and self.max_batch_size is None

    @property
    def max_gap_seconds(self) -> float | None:
        """Seconds that a step may take for which streams wait; None: it has no bound."""
        milliseconds = self.max_gap_ms
        if milliseconds is None:
            milliseconds = 100.0 if self.resolved_device == "cpu" else 120.0
        # `alternate` computes prompts whole.
        return milliseconds / 1000 if milliseconds and self.batching != "alternate" else None

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
        """Requests running and waiting, at most: see `requests_taken`."""
        return self.requests_taken(self.resolved_batch_size)

    def requests_taken(self, rows: int) -> int:
        """The same where so many run at once: while one batch runs, three more may wait."""
        return self.max_concurrent_requests or _BATCHES_TAKEN * rows

    @property
    def resolved_front_end_bytes(self) -> int:
        """Bytes of the front ends' memory that calls may hold together."""
        messages = self.resolved_concurrent_requests * self.max_message_bytes
        usual = min(max(messages, _LEAST_FRONT_END_BYTES), _MOST_FRONT_END_BYTES)
        return self.max_front_end_bytes or usual

    def resolved_queue_tokens(self, slots: int) -> int:
        """Prompt tokens waiting, with a KV cache of so many: what waits fits into it once."""
        return self.max_queue_tokens or max(slots, _LEAST_QUEUE_TOKENS)

    @property
    def resolved_prefill_tokens(self) -> int:
        """Prompt tokens of one step, at most."""
        if self.max_batch_prefill_tokens is not None:
            return self.max_batch_prefill_tokens
        usual = 512 if self.resolved_device == "cpu" else 4096
        return min(usual, self.max_batch_total_tokens or usual)

    @property
    def short_prompt_steps(self) -> bool:
        """Whether steps keep `max_gap_seconds` while nobody streams, too.

        `alternate` computes prompts whole.
        """
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
    def resolved_image_workers(self) -> int:
        """Of each front end: one client's connection, and so all its images, may be of one."""
        if self.image_workers is not None or self.resolved_device == "cpu":
            return self.image_workers or 2
        return min(max(len(os.sched_getaffinity(0)) // 3, 2), 6)

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
    def loopback_address(self) -> str | None:
        """Where every service listens for this machine alone, in plaintext; None: nowhere."""
        return f"127.0.0.1:{self.loopback_port}" if self.loopback_port else None

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
    def resolved_image_hosts(self) -> frozenset[str]:
        """From where images may be fetched."""
        hosts = (self.image_url_hosts or "").split(",")
        return frozenset(host.strip().lower() for host in hosts if host.strip())

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


def named_adapters(text: str | None) -> list[tuple[str, str]]:
    """Names and places of `NAME=PATH,PATH`; a place alone is its own name.

    Raises ValueError for what is no such list.
    """
    found: dict[str, str] = {}
    for part in (text or "").split(","):
        if not (part := part.strip()):
            continue
        name, equals, place = part.partition("=")
        name, place = (name.strip(), place.strip()) if equals else (part, part)
        if not name or not place:
            raise ValueError(f"{part!r} is not NAME=PATH")
        if len(name.encode()) > MOST_ADAPTER_NAME_BYTES or not name.isprintable():
            raise ValueError(
                f"{name[:80]!r} is no name of 1 to {MOST_ADAPTER_NAME_BYTES} printable bytes"
            )
        if name in found:
            raise ValueError(f"{name} is named twice")
        found[name] = place
    return list(found.items())


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
