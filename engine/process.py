"""The engine as a process of its own: `python -m tokenpod.engine.process [compile] FD...`.

It is started by the service, talks over the inherited sockets alone (one a front end), and ends
when the first of them closes. As a rank of a group it has a line to the service besides, and ends
when the group does. It is started before the service has imported what makes its options, and
imports meanwhile; with `compile`, so does a process that compiles kernels for it.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from tokenpod.core.diagnosis import answer_questions
from tokenpod.core.errors import EngineError
from tokenpod.core.link import LinkClosed
from tokenpod.core.messages import Broken, EngineOptions
from tokenpod.core.own_process import die_with_parent
from tokenpod.engine.exchange import Face, face_of
from tokenpod.engine.startup.compile_ahead import CompileAhead, hash_triton
from tokenpod.engine.startup.conditions import sources
from tokenpod.models.checkpoints.errors import ModelError

if TYPE_CHECKING:
    from tokenpod.engine.shards.member import Member


def main() -> int:
    """Serve the links until the first closes."""
    die_with_parent()
    # The service decides when to stop; a terminal's Ctrl-C reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    compiles = sys.argv[1:2] == ["compile"]
    ahead = CompileAhead() if compiles else None
    numbers = [int(number) for number in sys.argv[1 + compiles :]]
    link = face_of([socket.socket(fileno=number) for number in numbers])
    member: Member | None = None
    # All that imports make stays: walks of the collector through it take a tenth of the time, and
    # find nothing.
    gc.disable()
    imports = threading.Thread(target=_import_ahead, args=[compiles], name="imports")
    imports.start()
    try:
        options = link.receive(None)[0]
        assert isinstance(options, EngineOptions), "the first message is EngineOptions"
        if options.questions_fd >= 0:
            answer_questions(options.questions_fd)
        if ahead is not None:
            ahead.begin(options)
        if options.placement is not None:
            gc.enable()  # others may come much later
            member = _member(options)
            member.join()
        if options.device.startswith("cuda"):
            sources()  # not once threads read weights, beside which it takes five times as long
        _imported_run()(options, link, member, ahead)
    except LinkClosed:
        if member is not None:
            member.leave()
        return 0
    except (EngineError, ModelError) as error:
        if member is not None:
            member.fail(error, str(error))
        # The service may have found the same fault itself, and be gone.
        with contextlib.suppress(LinkClosed):
            link.send(Broken(str(error)))
    except BaseException as error:
        line = f"the engine failed: {type(error).__name__}"
        if member is not None:
            member.fail(error, line)
        traceback.print_exc()
        with contextlib.suppress(LinkClosed):
            link.send(Broken(line))
    finally:
        imports.join()  # what is imported while the interpreter ends fails, with a traceback
    return 1


def _member(options: EngineOptions) -> Member:
    """This rank, which sends heartbeats from now on; with it comes gRPC, for groups alone."""
    from tokenpod.engine.shards.member import Member

    return Member(options)


def _import_ahead(compiles: bool) -> None:
    """What takes longest, and nothing of ours: two threads may not import each other's halves.

    Where kernels are compiled, this is the first engine of a machine with GPUs, and has the first.
    """
    if compiles:
        hash_triton()
    import torch

    if compiles:
        # What is wrong with a device is found and told later.
        with contextlib.suppress(AssertionError, RuntimeError):
            torch.cuda.synchronize(0)


def _imported_run() -> Callable[[EngineOptions, Face, Member | None, CompileAhead | None], None]:
    """What loads the model and takes steps.

    Imported late, because it takes seconds, and what a group waits for is reported at once.
    """
    gc.disable()
    from tokenpod.engine.run import run

    gc.freeze()
    gc.enable()
    return run


if __name__ == "__main__":
    sys.exit(main())
