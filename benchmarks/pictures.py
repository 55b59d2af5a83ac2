"""Draw what docs/performance.md shows as a picture, from the figures in benchmarks/results.

    python -P benchmarks/pictures.py

A bar is how many times as fast as the peer we are; a mark, where the physical limit is known, is
how many times as fast anything could be.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
IMAGES = HERE.parent / "docs" / "images"


def times_as_fast(case: dict[str, Any], whose: str) -> float:
    """How many times as fast as the peer: of rates a quotient, of times its inverse."""
    ours, peer = float(case[whose]), float(case["vllm"])
    return ours / peer if case["unit"].endswith("/s") else peer / ours


def draw(figures: dict[str, Any], target: Path) -> None:
    """A bar a case, in their order."""
    cases = figures["cases"][::-1]
    figure, axis = plt.subplots(figsize=(9, 0.5 * len(cases) + 1.4))
    ratios = [times_as_fast(case, "tokenpod") for case in cases]
    axis.barh(
        [case["case"] for case in cases],
        ratios,
        color=["#2f7ed8" if ratio >= 1 else "#c8ced8" for ratio in ratios],
        height=0.66,
    )
    for place, (case, ratio) in enumerate(zip(cases, ratios, strict=True)):
        shown = f"{ratio:.2f}   {case['tokenpod']:,} and {case['vllm']:,} {case['unit']}"
        ink = "white" if ratio >= 1 else "black"
        axis.text(0.02, place, shown, color=ink, va="center", fontsize=8)
        if "limit" in case:
            limit = times_as_fast(case, "limit")
            axis.plot([limit, limit], [place - 0.35, place + 0.35], color="#d9534f", linewidth=2)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_xlim(0, 2)
    axis.set_xlabel("times as fast as vLLM (red: the physical limit, where it is known)")
    axis.set_title(figures["title"], fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target, dpi=90)
    plt.close(figure)


if __name__ == "__main__":
    for path in sorted((HERE / "results").glob("*.json")):
        draw(json.loads(path.read_text()), IMAGES / f"{path.stem}.png")
