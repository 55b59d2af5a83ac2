"""Controllers: the pods that a rendered release asks for, and how they are replaced one by one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from deploy.helm import NAMESPACE, Object, Rendered
from deploy.kubelet import Pod
from deploy.manifests import pod_of
from deploy.sandbox import Place, Sandbox

_INDEX = "apps.kubernetes.io/pod-index"
_LWS = "leaderworkerset.sigs.k8s.io"


@dataclass
class Namespace:
    """Where one release runs. Make it with `running`."""

    rendered: Rendered
    folder: Path
    claims: Path
    pods: list[Pod] = field(default_factory=list)
    #: Pods that have ended.
    gone: list[Pod] = field(default_factory=list)
    #: What the cluster's DNS knows.
    names: dict[str, str] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def place(self) -> Place:
        """What its pods find around them."""
        return Place(self.folder / "pods", self.claims, self.folder / "secrets", self.names)

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, rendered: Rendered, folder: Path, claims: Path
    ) -> AsyncIterator[Namespace]:
        """All pods started, not yet ready; no process is left in the end."""
        here = cls(rendered, folder, claims)
        try:
            for each in rendered.all("Deployment"):
                for _ in range(each["spec"]["replicas"]):
                    here._create(each)
            for each in rendered.all("StatefulSet"):
                for ordinal in range(each["spec"]["replicas"]):
                    here._create_ordinal(each, ordinal)
            for each in rendered.all("LeaderWorkerSet"):
                for group in range(each["spec"]["replicas"]):
                    here._create_group(each, group)
            yield here
        finally:
            await asyncio.gather(*(pod.remove() for pod in here.pods))

    async def until_ready(self) -> None:
        """All pods."""
        await asyncio.gather(*(pod.until_ready() for pod in self.pods))

    async def roll(self) -> None:
        """Replace every pod, as after a change of the template."""
        for each in self.rendered.all("Deployment"):
            await self._roll_deployment(each)
        # Controllers know nothing of each other.
        await asyncio.gather(*map(self._roll_stateful_set, self.rendered.all("StatefulSet")))
        for each in self.rendered.all("LeaderWorkerSet"):
            await self._roll_leader_worker_set(each)

    async def test(self) -> tuple[int, str]:
        """Run the release's test hook: exit status and output."""
        (pod,) = self.rendered.hooks
        (container,) = pod["spec"]["containers"]
        name, labels = pod["metadata"]["name"], pod["metadata"]["labels"]
        sandbox = Sandbox(self.place, name, "127.0.0.1", labels, pod["spec"])
        command, env, folder = sandbox.invocation(container)
        process = await asyncio.create_subprocess_exec(
            *command,
            env=env,
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()

    # -- Replacing -------------------------------------------------------------------------------

    async def _roll_deployment(self, deployment: Object) -> None:
        rolling = deployment["spec"]["strategy"]["rollingUpdate"]
        old = list(self.pods)
        new: list[Pod] = []
        replicas = len(old)
        while old or len(new) < replicas:
            while len(new) < replicas and len(old) + len(new) < replicas + rolling["maxSurge"]:
                new.append(self._create(deployment))
            available = len(old) + sum(pod.ready for pod in new)
            if old and available > replicas - rolling["maxUnavailable"]:
                await self._end(old.pop(0))
            else:
                await asyncio.gather(*(pod.until_ready() for pod in new))
        await asyncio.gather(*(pod.until_ready() for pod in new))

    async def _roll_stateful_set(self, stateful_set: Object) -> None:
        """From the highest ordinal down, each only once the one before is ready."""
        for ordinal in reversed(range(stateful_set["spec"]["replicas"])):
            await self._end(self._named(f"{stateful_set['metadata']['name']}-{ordinal}"))
            await self._create_ordinal(stateful_set, ordinal).until_ready()
            await asyncio.sleep(stateful_set["spec"]["minReadySeconds"])

    async def _roll_leader_worker_set(self, lws: Object) -> None:
        """Group by group. Workers belong to their leader: they are stopped once it has ended."""
        for group in reversed(range(lws["spec"]["replicas"])):
            leader = f"{lws['metadata']['name']}-{group}"
            workers = [pod for pod in self.pods if pod.name.startswith(f"{leader}-")]
            await self._end(self._named(leader))
            await asyncio.gather(*map(self._end, workers))
            new = self._create_group(lws, group)
            await asyncio.gather(*(pod.until_ready() for pod in new))

    async def _end(self, pod: Pod) -> None:
        await pod.delete()
        self.pods.remove(pod)
        self.gone.append(pod)

    def _named(self, name: str) -> Pod:
        (pod,) = [pod for pod in self.pods if pod.name == name]
        return pod

    # -- Creating --------------------------------------------------------------------------------

    def _create(self, controller: Object, name: str = "", **given: dict[str, str]) -> Pod:
        """A new pod. One with a name keeps its address, which a real one would not."""
        number = next(self._numbers)
        fresh = f"{controller['metadata']['name']}-{number}"
        address = self.names.setdefault(name or fresh, address_of(number))
        pod = Pod(name or fresh, address, pod_of(controller), self.place, **given)
        self.pods.append(pod)
        pod.start()
        return pod

    def _create_ordinal(self, stateful_set: Object, ordinal: int) -> Pod:
        name = f"{stateful_set['metadata']['name']}-{ordinal}"
        pod = self._create(stateful_set, name, given_labels={_INDEX: str(ordinal)})
        self.names[f"{name}.{stateful_set['spec']['serviceName']}.{NAMESPACE}.svc"] = pod.address
        return pod

    def _create_group(self, lws: Object, group: int) -> list[Pod]:
        name, size = lws["metadata"]["name"], lws["spec"]["leaderWorkerTemplate"]["size"]
        leader = f"{name}-{group}"
        variables = {"LWS_LEADER_ADDRESS": f"{leader}.{name}.{NAMESPACE}"}
        pods = [
            self._create(
                lws,
                f"{leader}-{index}" if index else leader,
                given_labels={f"{_LWS}/worker-index": str(index)},
                given_variables=variables,
            )
            for index in range(size)
        ]
        self.names[variables["LWS_LEADER_ADDRESS"]] = pods[0].address
        return pods


def address_of(number: int) -> str:
    """The address of the pod of this number, from 1: one that no other test process uses."""
    process = os.getpid()
    return f"127.{100 + process // 250 % 100}.{1 + process % 250}.{number}"
