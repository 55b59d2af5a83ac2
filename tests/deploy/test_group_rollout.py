"""Groups of pods run as rendered: they form, serve through their leader, and are replaced."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from deploy.certificates import Authority
from deploy.emulator import Namespace, address_of
from deploy.helm import Helm
from deploy.rollout import assert_nothing_was_lost, traffic, until, values

#: Steps of a group take longer than those of one rank.
LENGTHS = (20, 60, 300)


@pytest.mark.slow
async def test_no_accepted_request_fails_while_the_pods_of_a_group_are_replaced(
    helm: Helm, tmp_path: Path, claims: Path
) -> None:
    parallelism = {"mode": "statefulset", "tensor": 2, "pods": 2}
    # The names that DNS would have for pods stand for addresses here, so certificates name those.
    pods = [f"IP:{address_of(number)}" for number in (1, 2)]
    Authority(tmp_path / "secrets").issue("peers", *pods)
    rendered = helm.install(
        values(parallelism=parallelism, tls={"shards": {"existingSecret": "peers"}})
    )
    async with Namespace.running(rendered, tmp_path, claims) as here:
        await here.until_ready()
        async with traffic(here, LENGTHS) as seen:
            await here.roll()
        assert {pod.name for pod in here.gone} == {
            "demo-tokenpod-leader-0",
            "demo-tokenpod-follower-1-0",
        }
        assert_nothing_was_lost(here, seen)


@pytest.mark.slow
async def test_stateful_sets_replace_one_copy_of_the_model_after_the_other(
    helm: Helm, tmp_path: Path, claims: Path
) -> None:
    parallelism = {"mode": "statefulset", "tensor": 2, "pods": 2}
    rendered = helm.install(values(replicaCount=2, parallelism=parallelism))

    def serving(here: Namespace) -> list[str]:
        return [pod.name for pod in here.pods if "leader" in pod.name and pod.ready]

    async with Namespace.running(rendered, tmp_path, claims) as here:
        await here.until_ready()
        async with traffic(here, LENGTHS) as seen:
            rolled = asyncio.create_task(here.roll())
            while not rolled.done():
                assert serving(here), [pod.name for pod in here.gone]
                await asyncio.sleep(0.05)
            await rolled
        assert len(here.gone) == 4
        assert_nothing_was_lost(here, seen)


@pytest.mark.slow
async def test_no_accepted_request_fails_while_whole_groups_are_replaced(
    helm: Helm, tmp_path: Path, claims: Path
) -> None:
    parallelism = {"mode": "lws", "tensor": 2, "pods": 2}
    rendered = helm.install(values(replicaCount=2, parallelism=parallelism))
    async with Namespace.running(rendered, tmp_path, claims) as here:
        await here.until_ready()
        async with traffic(here, LENGTHS) as seen:
            await here.roll()
        assert len(here.gone) == 4
        assert_nothing_was_lost(here, seen)


@pytest.mark.slow
async def test_a_group_forms_again_when_a_pod_was_killed_and_the_others_stay(
    helm: Helm, tmp_path: Path, claims: Path
) -> None:
    parallelism = {"mode": "statefulset", "tensor": 2, "pods": 2}
    rendered = helm.install(values(parallelism=parallelism))
    async with Namespace.running(rendered, tmp_path, claims) as here:
        await here.until_ready()
        leader, follower = sorted(here.pods, key=lambda pod: "follower" in pod.name)
        async with traffic(here, LENGTHS) as seen:
            follower.kill()
            await until(lambda: not leader.ready)
            await until(lambda: leader.ready)
        assert (leader.exits, follower.exits) == ([], [-signal.SIGKILL])
        # What ran is lost, and may be tried again.
        assert all(said.startswith("UNAVAILABLE") for said in seen.failed)
