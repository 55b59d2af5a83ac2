"""One server on the embedded model for all tests of a process that only talk to it."""

from __future__ import annotations

import functools
import gc
import logging
import os
import random
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from support.examples import examples
from support.gpu_lock import gpu_lock
from support.pods import prefork
from support.pods.harness import ServerProcess, serve
from support.shared import Shared
from support.waiting import wait_for

if TYPE_CHECKING:
    from support.checkpoints.golden import SharedGoldens

# Without an NVIDIA GPU, or with torch's build for CPUs, Triton interprets kernels. It reads this
# when it is imported first, which other libraries may do before any test of ours.
with_cuda = any(need.startswith("nvidia-") for need in requires("torch") or ())
interpreted = not (with_cuda and Path("/dev/nvidiactl").exists())
if interpreted:
    os.environ["TRITON_INTERPRET"] = "1"

# torch's threads spin while they wait for each other, on processors that other tests need, and tiny
# tensors gain nothing from more than one. Programs that tests start inherit this.
os.environ["OMP_NUM_THREADS"] = "1"

# jsonschema imports it for IRIs, if it is there; it takes two seconds, and no test looks at them.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]

# A shell without job control ignores SIGINT for what it runs in the background (`make test &` in a
# script, some CI), and every program that a test starts would inherit that. A handler, however, is
# reset to the default when a program starts: this one changes nothing here, and lets Ctrl-C reach
# programs under test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, lambda number, frame: None)


FOLDER = Path(__file__).parent
#: Variable with a path that is there once the first process of several has imported all tests.
_COMPILED = "TESTS_COMPILED"
#: Folders and fixtures whose tests start processes, servers mostly.
POD_FOLDERS = ("chaos/", "deploy/", "examples/", "server/", "tools/")
POD_FIXTURES = frozenset({"server", "shard", "stub"})
#: Folders whose tests compute for seconds: their kernels are interpreted.
COMPUTE_FOLDERS = ("kernels/triton/",)
#: Audit events of a process that starts another; the last one is our own (prefork.py).
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "prefork.start")
#: Folders whose tests keep a processor busy.
COMPUTING = ("engine", "kernels", "models")
#: And those whose files take a second or two.
SHORT = ("core", "service")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the collector from walking through all that is imported, now and between tests.

    In a new clone one process compiles all test modules, and the others read what it wrote.
    """
    turn, worker = os.environ.get(_COMPILED), os.environ.get("PYTEST_XDIST_WORKER")
    if turn and worker != "gw0":
        wait_for(Path(turn).exists, seconds=300)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        if turn and worker == "gw0":
            Path(turn).touch()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests with their tier, and order files for processes."""
    let_loggers_propagate()
    mark_sampled(items)
    mark_tiers(items)
    if hasattr(config, "workerinput"):  # pytest-xdist's
        items[:] = interleaved(items)
    # First, while nothing else has the GPU: the others would wait for it in the middle of theirs.
    items.sort(key=lambda item: item.get_closest_marker("fills_gpu") is None)  # stable


@functools.cache
def place_of(path: Path) -> str:
    """Where a file lies below tests/."""
    return path.relative_to(FOLDER).as_posix()


def mark_tiers(items: list[pytest.Item]) -> None:
    """`unit` is what has no other tier; besides what says so, `pod` is what uses a server."""
    for item in items:
        place = place_of(item.path)
        fixtures = frozenset(getattr(item, "fixturenames", ()))
        if place.startswith(POD_FOLDERS) or fixtures & POD_FIXTURES:
            item.add_marker("pod")
        if place.startswith(COMPUTE_FOLDERS):
            item.add_marker("compute")
        if not any(item.get_closest_marker(tier) for tier in ("compute", "pod", "slow", "gpu")):
            item.add_marker("unit")


def asks_the_system(arguments: tuple[object, ...]) -> bool:
    """Whether a process is one that libraries start when they are imported, such as `ldconfig`."""
    names = {Path(str(program)).name for program in arguments[:1]}
    return not names.isdisjoint({"gcc", "ldconfig", "ninja", "uname"})


class NoProcesses:
    """An attempt to start a process fails a test that is not of the tier for that."""

    def __init__(self) -> None:
        self.test: str | None = None
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in STARTS and self.test is not None and not asks_the_system(arguments):
            name, self.test = self.test, None
            pytest.fail(f"{name} starts a process, and is not marked pod ({arguments})")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Remember which test runs that must start none."""
        free = any(item.get_closest_marker(tier) for tier in ("pod", "slow", "gpu"))
        self.test = None if free else item.nodeid
        try:
            return (yield)
        finally:
            self.test = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tests that use the GPU wait while one fills it."""
    if not item.get_closest_marker("gpu"):
        return (yield)
    with gpu_lock(fills=item.get_closest_marker("fills_gpu") is not None):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test draws and computes the same whatever ran before it in this process.

    What interpreted operations come to is found out once per file: it takes a third of the time.
    """
    random.seed(0)
    if quick := sys.modules.get("support.kernels.quick_operations"):
        quick.forget_before(item.path)
    if torch := sys.modules.get("torch"):
        # torch.manual_seed writes down the stack for each kind of device that is not there.
        (torch.default_generator if interpreted else torch).manual_seed(0)


def pytest_configure(config: pytest.Config) -> None:
    """Audit hooks stay for the life of a process: there is one of ours."""
    config.pluginmanager.register(NoProcesses())
    if getattr(config.option, "numprocesses", None):  # pytest-xdist's, of who starts processes
        prefork.share()
        if not (FOLDER / "models" / "__pycache__").exists():
            folder = tempfile.TemporaryDirectory()
            config.add_cleanup(folder.cleanup)
            os.environ[_COMPILED] = f"{folder.name}/compiled"
    # What a test draws comes slowly where others have the processors: that says nothing of it.
    settings.register_profile(
        "tokenpod",
        max_examples=examples(100),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("tokenpod")


def interleaved(items: list[pytest.Item]) -> list[pytest.Item]:
    """Files that wait for servers beside files that compute, so that processors are always busy.

    Short ones come last: at the end no process has a long one left.
    """
    waiting, computing, others = dict[Path, float](), dict[Path, float](), dict[Path, float]()
    for item in items:
        folder = place_of(item.path).partition("/")[0]
        kind = waiting if folder == "server" else computing if folder in COMPUTING else others
        kind[item.path] = 2.0 if folder in SHORT else 1.0
    for kind in (waiting, computing):
        kind.update({path: (at + 0.5) / len(kind) for at, path in enumerate(kind)})
    places = waiting | computing | others
    return sorted(items, key=lambda item: places[item.path])  # stable


def let_loggers_propagate() -> None:
    """pytest hangs its handlers onto each logger that does not, six times a test: torch has 44."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


def mark_sampled(items: list[pytest.Item]) -> None:
    """Of a test marked `sampled(n, marker)`, all cases but every n-th get that marker too.

    Cases that cost much more here than they tell (an interpreted kernel, a loop compiled for each)
    are so left to the runs of `gpu` or `slow`. An n without a factor in common with the numbers of
    values spreads what is kept over all of them. With `by_turns=True` the first case that is kept
    is another one from test to test: for files whose tests all have the same few cases.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for turn, cases in enumerate(tests.values()):
        for at, item in enumerate(cases):
            sampled = item.get_closest_marker("sampled")
            assert sampled
            every, rest = sampled.args
            first = turn % min(every, len(cases)) if sampled.kwargs.get("by_turns") else 0
            if (at - first) % every:
                item.add_marker(rest)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """Folders that all processes of this run have in common."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # of every process's own
    (root / "shared").mkdir(exist_ok=True)
    return Shared(root / "shared")


@pytest.fixture(scope="session")
def golden(shared: Shared) -> SharedGoldens:
    """Gives the checkpoint of a kind, which is made once in a run."""
    from support.checkpoints.golden import SharedGoldens  # imports transformers

    return SharedGoldens(shared)


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """A running server; tests must leave it as they found it."""
    # One process of a run starts it as users do, the others sooner.
    first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    with serve("--kv-cache-events", own_imports=first) as running:
        running.is_common = True
        yield running
        assert running.stop() == 0


@pytest.fixture(autouse=True)
def _idle_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test of the common server leaves no call, sequence or batch behind."""
    common = None
    if "server" in request.fixturenames:
        common = request.getfixturevalue("server")
    yield
    if getattr(common, "is_common", False):  # files may have other fixtures of that name
        common.wait_until_idle()


@pytest.fixture(scope="session")
def stub(server: ServerProcess) -> object:
    """Of the public API."""
    return server.stub()


@pytest.fixture(scope="session")
def shard(server: ServerProcess) -> object:
    """A `generate.v3` stub."""
    return server.shard()
