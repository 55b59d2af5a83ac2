"""Draw docs/images/dashboard.png: a pod's real load, as the dashboard's queries show it.

    python -P benchmarks/dashboard.py

A pod serves the demo model to clients that come and go, Prometheus (which must be installed)
fetches its metrics and evaluates every panel's query, and matplotlib draws what it answers. Grafana
draws the same numbers in its own way.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import types
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, PercentFormatter

HERE = Path(__file__).resolve().parent
if "benchmarks" not in sys.modules:
    # As in run.py: the checkout's root stays off the path.
    sys.modules["benchmarks"] = types.ModuleType("benchmarks")
    sys.modules["benchmarks"].__path__ = [str(HERE)]

from benchmarks.support.pod import Pod, free_port  # noqa: E402 (the package is made above)
from tokenpod_client import Client, ServerError  # noqa: E402

DASHBOARD = HERE.parent / "deploy" / "helm" / "tokenpod" / "files" / "dashboard.json"
PICTURE = HERE.parent / "docs" / "images" / "dashboard.png"
FLAGS = ["--max-concurrent-requests", "24", "--max-batch-size", "16", "--speculate", "2"]
SCRAPE_SECONDS, RATE_SECONDS = 1, 10
#: Clients at once and seconds, one phase after the other.
PHASES = ((2, 30), (12, 40), (32, 40), (2, 30))
QUESTION = "def read_lines(path):\n    with open(path) as file:\n"
WANTED = {"json_schema": {"type": "object", "properties": {"n": {"type": "integer"}}}}


def work(address: str, at: int, over: Callable[[], bool]) -> None:
    """Be a client: each fourth one wants JSON, cancels, or asks for what can't be."""
    with Client(address, deadline=30) as client:
        for call in itertools.count():
            if over():
                return
            try:
                if at % 4 == 1 and call % 3 == 0:
                    client.generate_once("n = ", constraint=WANTED, max_new_tokens=40)
                elif at % 4 == 2 and call % 3 == 0:
                    stream = client.generate(QUESTION, max_new_tokens=200)
                    next(iter(stream))
                    stream.close()
                elif at % 4 == 3 and call % 5 == 0:
                    client.generate_once(QUESTION, top_p=7)
                else:
                    client.generate_once(QUESTION * (1 + at % 8) + f"# {call}\n", max_new_tokens=64)
            except ServerError:
                time.sleep(0.2)


def load(address: str) -> None:
    """All phases."""
    for clients, seconds in PHASES:
        end = time.monotonic() + seconds
        threads = [
            threading.Thread(
                target=work, args=(address, at, lambda end=end: time.monotonic() > end)
            )
            for at in range(clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def prometheus(folder: Path, target: int, port: int) -> subprocess.Popen[bytes]:
    """Start Prometheus, which fetches from one port and answers at the other."""
    config = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s"},
        "scrape_configs": [
            {"job_name": "tokenpod", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
        ],
    }
    # JSON is YAML.
    (folder / "prometheus.yaml").write_text(json.dumps(config))
    command = ["prometheus", f"--config.file={folder}/prometheus.yaml", "--log.level=error"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
    return subprocess.Popen(command)


def ask(port: int, expr: str, began: float, ended: float) -> list[dict[str, Any]]:
    """The series that a panel shows of this time."""
    filled = {"$__rate_interval": f"{RATE_SECONDS}s", "$job": ".*", "$instance": ".*"}
    for variable, value in filled.items():
        expr = expr.replace(variable, value)
    asked = {"query": expr, "start": began, "end": ended, "step": SCRAPE_SECONDS}
    url = f"http://127.0.0.1:{port}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
    with urllib.request.urlopen(url) as answer:
        return list(json.load(answer)["data"]["result"])


def draw(axis: Axes, panel: dict[str, Any], port: int, began: float, ended: float) -> None:
    """One panel."""
    shown = 0
    for target in panel["targets"]:
        for series in ask(port, target["expr"], began, ended):
            labels = series["metric"]
            name = re.sub(
                r"{{(\w+)}}", lambda found, of=labels: of.get(found[1], ""), target["legendFormat"]
            )
            times, values = zip(*series["values"], strict=True)
            seconds = [each - began for each in times]
            axis.plot(seconds, list(map(float, values)), label=re.sub("127.*", "pod", name), lw=1.2)
            shown += 1
    axis.set_title(panel["title"], fontsize=8, loc="left")
    axis.set_xlim(0, ended - began)
    axis.tick_params(labelsize=6)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    unit = panel["fieldConfig"]["defaults"].get("unit")
    if not shown:
        axis.text(
            0.5, 0.5, "no data in this run", transform=axis.transAxes, ha="center", fontsize=7
        )
        axis.set_yticks([])
        return
    axis.set_ylim(bottom=0)
    if unit == "percentunit":
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    elif unit == "s":
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
    axis.legend(fontsize=5, loc="upper left", framealpha=0.6)


def main() -> None:
    """Run the load, draw, stop."""
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if "targets" in panel]
    metrics, port = free_port(), free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        Pod([*FLAGS, "--metrics-port", str(metrics)]) as pod,
    ):
        server = prometheus(Path(folder), metrics, port)
        try:
            time.sleep(2 * SCRAPE_SECONDS)
            began = time.time()
            load(pod.address)
            ended = time.time()
            time.sleep(2 * SCRAPE_SECONDS)
            rows = -(-len(panels) // 3)
            figure, axes = plt.subplots(rows, 3, figsize=(12, 1.75 * rows), layout="constrained")
            for axis in axes.flat[len(panels) :]:
                axis.set_axis_off()
            for panel, axis in zip(panels, axes.flat, strict=False):
                draw(axis, panel, port, began, ended)
            figure.savefig(PICTURE, dpi=80)
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main()
