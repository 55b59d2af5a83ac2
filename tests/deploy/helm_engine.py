"""The process behind helm.Helm: orders on standard input, answers on standard output, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from helm_sdkpy import Configuration, HelmError, Install, Lint

from deploy.cluster import Cluster

#: Some Kubernetes, where it does not matter.
_ANY = "1.34"


def _done(order: dict[str, Any], cluster: Cluster) -> Any:
    config = Configuration(order.get("namespace", "default"), kubeconfig=cluster.kubeconfig)
    if order["action"] == "lint":
        return asyncio.run(Lint(config).run(order["chart"]))
    install = Install(config).run(
        order["release"], order["chart"], values=order["values"], wait=False
    )
    return asyncio.run(install)


def main() -> None:
    cluster = Cluster()
    for line in sys.stdin:
        order = json.loads(line)
        with cluster.serving(order.get("kubernetes", _ANY)):
            try:
                answer = {"done": _done(order, cluster)}
            except HelmError as error:
                answer = {"refused": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
