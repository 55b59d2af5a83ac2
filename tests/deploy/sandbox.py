"""What a container runtime makes of a manifest on this machine: a command, its variables, folders.

Command, arguments and variables are the manifest's, with what the downward API and the cluster's
names stand for. Each volume is a folder. Images, cgroups and users there are none.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.helm import NAMESPACE, Object
from deploy.manifests import environment, expanded

#: What the image has on its path, and where.
TOKENPOD = [sys.executable, "-P", "-m", "tokenpod"]
_PROGRAMS = {"tokenpod": TOKENPOD}
_PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


@dataclass(frozen=True)
class Place:
    """What pods find around them.

    Args:
        scratch: for volumes that live as long as their pod.
        claims: a folder for each claim.
        secrets: a folder for each secret, with a file for each key.
        names: what the cluster's DNS knows; the values are addresses.
    """

    scratch: Path
    claims: Path
    secrets: Path
    names: Mapping[str, str]


@dataclass(frozen=True)
class Sandbox:
    """One pod's surroundings.

    Args:
        name: the pod's.
        address: its IP address.
        labels: its labels, with those that controllers add.
        spec: its specification.
    """

    place: Place
    name: str
    address: str
    labels: Mapping[str, str]
    spec: Object

    @property
    def log(self) -> Path:
        """Where the container's output goes."""
        return self.place.scratch / self.name / "log"

    def invocation(self, container: Object) -> tuple[list[str], dict[str, str], Path]:
        """What to run, in which environment and where. The volumes are there then."""
        folders = {
            mount["mountPath"]: self._folder(mount["name"]) for mount in container["volumeMounts"]
        }
        variables = environment(container, self._fields())
        words = [expanded(word, variables) for word in (*container["command"], *container["args"])]
        program, *rest = (self._here(word, folders) for word in words)
        env = {name: self._here(value, folders) for name, value in variables.items()}
        return [*_PROGRAMS.get(program, [program]), *rest], {"PATH": _PATH, **env}, folders["/tmp"]

    def _fields(self) -> dict[str, str]:
        """The downward API."""
        labels = {f"metadata.labels['{name}']": value for name, value in self.labels.items()}
        return {
            **labels,
            "metadata.name": self.name,
            "metadata.namespace": NAMESPACE,
            "status.podIP": self.address,
            "spec.nodeName": "this-machine",
        }

    def _folder(self, name: str) -> Path:
        """A volume of the pod."""
        (volume,) = [each for each in self.spec["volumes"] if each["name"] == name]
        if claim := volume.get("persistentVolumeClaim"):
            folder = self.place.claims / claim["claimName"]
        else:
            folder = self.place.scratch / self.name / name
        folder.mkdir(parents=True, exist_ok=True)
        if secret := volume.get("secret"):
            # As kubelet does: a pod does not start without a key that it names.
            for item in secret["items"]:
                key = self.place.secrets / secret["secretName"] / item["key"]
                shutil.copy(key, folder / item["path"])
        return folder

    def _here(self, word: str, folders: Mapping[str, Path]) -> str:
        """`word` with the pod's paths, and the cluster's names, as they are on this machine."""
        for path, folder in folders.items():
            word = word.replace(f"{path}/", f"{folder}/")
            if word.endswith(path):
                word = f"{word.removesuffix(path)}{folder}"
        flag, equals, value = word.rpartition("=")
        return f"{flag}{equals}{self.place.names.get(value, value)}"
