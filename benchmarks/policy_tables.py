"""Tables and pictures of what `policies.py` has found."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown: all at once, and at some loads."""
    loads = [load for load in (1.0, 1.5, 2.0) if any(row.get("load") == load for row in rows)]
    head = ["pair", "at once, tokens/s", "preemptions, computed again", "KV use"]
    head += [f"at {load:g}: good/s, ttft p99, gap p99" for load in loads]
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for pair in dict.fromkeys(row["pair"] for row in rows if "load" in row):
        own = {row["load"]: row for row in rows if row["pair"] == pair}
        most = own[None]
        again = f"{most['wasted_tokens']:,}" if "wasted_tokens" in most else "-"
        cells = [f"{most['tokens_per_s']:,.0f}", f"{most['preemptions']:,}, {again}"]
        cells.append(f"{most['kv_mean']:.0%}")
        for load in loads:
            if (at := own.get(load)) is None:
                cells.append("-")
                continue
            gap = f"{at['itl_p99'] * 1e3:.0f} ms"
            cells.append(f"{at['goodput_per_s']:.1f}, {at['ttft_p99']:.2f} s, {gap}")
        yield f"| {pair} | " + " | ".join(cells) + " |"


def plot(options: argparse.Namespace) -> None:
    import matplotlib.pyplot as plt

    for path in sorted(Path(options.out).glob("*.json")):
        rows = json.loads(path.read_text())
        print(f"\n{path.stem}\n")
        print("\n".join(table(rows)))
        loads = sorted({row["load"] for row in rows if row.get("load")})
        if len(loads) < 2:
            continue
        shown = {
            "output tokens per second": "tokens_per_s",
            "good requests per second": "goodput_per_s",
            "first token, 99th percentile, s": "ttft_p99",
            "gap between tokens, 99th percentile, s": "itl_p99",
        }
        figure, axes = plt.subplots(2, 2, figsize=(11, 8))
        for (title, name), axis in zip(shown.items(), axes.flat, strict=True):
            for pair in dict.fromkeys(row["pair"] for row in rows if "load" in row):
                own = {row["load"]: row[name] for row in rows if row["pair"] == pair}
                style = "--" if pair.endswith("alternate") else "-"
                axis.plot(loads, [own[load] for load in loads], style, marker="o", label=pair)
            axis.set_title(title)
            axis.set_xlabel("offered load, of saturation")
            axis.grid(alpha=0.3)
        axes[0, 0].legend(fontsize=7)
        figure.suptitle(path.stem)
        figure.tight_layout()
        target = Path(options.images) / f"schedulers-{path.stem}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=80)
        plt.close(figure)
