"""The page of metrics of a server."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from support.pods.harness import ServerProcess


@dataclass
class Scraped:
    """A page, parsed."""

    samples: list[Any]

    def sum(self, name: str, **labels: str) -> float:
        """Of all samples with this name and these labels, the others whatever they are."""
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@dataclass
class Pod:
    """A server with one."""

    server: ServerProcess
    metrics_port: int

    def scrape(self) -> Scraped:
        """All that it says now."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics") as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return Scraped([sample for family in families for sample in family.samples])
