"""Rows of images: computed in parts between steps, kept under a limit of bytes.

    EncodeImages(op) -> rows known? ---------------------------------> kept for op -> ImagesEncoded
                          | no, and no tensors came -----------------> ImagesEncoded(missing)
                          | no: the tower computes them, part by part ^
    Request(images of op) -> its rows become given embeddings; op is forgotten
    DropImages(op)        -> op is forgotten, also while the tower computes

One image at a time goes through the tower, so its rows never depend on its company. A thread has
the stack of the tower's call, which `Turns` cuts between layers: what steps of streams and parts of
images take stays in order, on a GPU in one queue. It reads files and takes memory on its own.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from tokenpod.core.images import DropImages, EncodeImages, ImagesEncoded, PreparedImage
from tokenpod.core.outputs import FailureCode
from tokenpod.core.requests import GivenVectors, Request
from tokenpod.engine.images.turns import Turns
from tokenpod.engine.steps.mailbox import Mark

if TYPE_CHECKING:
    from tokenpod.models.towers.tower import Tower

log = logging.getLogger("tokenpod.engine")

#: Images that the thread has: the one that it computes, and the next.
_AHEAD = 2

#: [n, width] on the host.
Rows = torch.Tensor


@dataclass(frozen=True, slots=True)
class _Made:
    """What the thread has made of an image."""

    key: bytes
    #: Valid once `end` has been passed; an exception, if it failed.
    rows: Rows | Exception
    #: Whether all of it is numbers.
    finite: torch.Tensor | None = None
    end: Mark | None = None

    @property
    def there(self) -> bool:
        """Whether the device has sent it."""
        return self.end is None or self.end.passed


@dataclass(slots=True)
class _Op:
    """A request's images on their way."""

    images: list[PreparedImage]
    #: Keys that the tower has yet to compute.
    left: set[bytes]
    rows: dict[bytes, Rows] = field(default_factory=dict)


class ImageEncoder:
    """Computes and keeps the rows of images. The step loop alone calls it.

    Args:
        tower: the model's; None: it has none, and every image is refused.
        device: where the tower is.
        cache_bytes: of rows that are kept for further requests; those of requests come on top.
        send: to the front ends.
        mutual: rows of an image see each other.
    """

    def __init__(
        self,
        tower: Tower | None,
        device: torch.device,
        cache_bytes: int,
        send: Callable[[msgspec.Struct], None],
        *,
        mutual: bool = False,
    ) -> None:
        self._tower, self._device, self._mutual = tower, device, mutual
        self._cache_bytes, self._send = cache_bytes, send
        self._cache: OrderedDict[bytes, Rows] = OrderedDict()
        self._cached = 0
        self._ops: dict[int, _Op] = {}
        #: Images that are to be computed, with the descriptors of their files; and which of them
        #: the thread has.
        self._queue: dict[bytes, tuple[PreparedImage, int]] = {}
        self._computing: set[bytes] = set()
        self._jobs: SimpleQueue[tuple[PreparedImage, int]] = SimpleQueue()
        self._made: deque[_Made] = deque()
        self._turns = Turns(on_gpu=device.type == "cuda")
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether the tower computes, so that somebody must look for its end."""
        return bool(self._queue or self._computing)

    @property
    def waiting(self) -> bool:
        """Whether the tower could compute now."""
        return self._turns.waiting

    def compute(self, most: int | None) -> None:
        """Let the tower, which is `waiting`, compute for about so many nanoseconds.

        It computes a layer at least; at most, and with None, the image that it is at. On a GPU it
        queues as much behind the steps that are queued.
        """
        self._turns.grant(most)

    def take(self, asked: EncodeImages) -> None:
        """Begin to compute what is not known; `ImagesEncoded` follows, now or later."""
        if self._tower is None:
            problem = "this engine computes no images"
            self._send(ImagesEncoded(asked.op, (), FailureCode.INVALID_ARGUMENT, problem))
            return
        known = {image.key: self._known(image.key) for image in asked.images}
        new = [image for image in asked.images if known[image.key] is None]
        coming = self._queue.keys() | self._computing
        # An image that is there twice has a file once.
        sent = {image.key: image for image in new if image.descriptor >= 0}
        missing = {image.key for image in new} - coming - sent.keys()
        if missing:
            self._send(ImagesEncoded(asked.op, tuple(missing)))
            return
        op = _Op(asked.images, {image.key for image in new})
        op.rows = {key: rows for key, rows in known.items() if rows is not None}
        self._ops[asked.op] = op
        try:
            for key, image in sent.items():
                if key not in coming:
                    # Opened now: the sender keeps the descriptor until it has an answer.
                    path = f"/proc/{asked.process}/fd/{image.descriptor}"
                    self._queue[key] = image, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            log.exception("the tensors of an image can't be opened")
            self._fail([asked.op])
            return
        self._answer_if_whole(asked.op)
        self._feed()

    def drop(self, dropped: DropImages) -> None:
        """Forget an op, and what waits to be computed for it alone; it has its answer, too."""
        op = self._ops.pop(dropped.op, None)
        if op is not None and op.left:
            self._forget(op)
            problem = "nobody wants them any more"
            self._send(ImagesEncoded(dropped.op, (), FailureCode.UNAVAILABLE, problem))

    def settle(self) -> None:
        """Take what the tower has computed, and answer who has waited for it."""
        while self._made and self._made[0].there:
            made = self._made.popleft()
            self._computing.discard(made.key)
            self._feed()
            rows = made.rows
            waiting = [name for name, op in self._ops.items() if made.key in op.left]
            if isinstance(rows, Exception) or not made.finite:
                if made.finite is not None:
                    log.error("the image tower has made numbers that are none")
                self._fail(waiting)
                continue
            self._keep(made.key, rows)
            for name in waiting:
                op = self._ops[name]
                op.rows[made.key] = rows
                op.left.discard(made.key)
                self._answer_if_whole(name)

    def given(self, request: Request) -> Request:
        """The request with the rows of its images as given embeddings."""
        if request.images is None:
            return request
        op = self._ops.pop(request.images.op)
        given = [*request.given]
        for run in request.images.runs:
            image = op.images[run.image]
            rows = op.rows[image.key][run.first : run.first + run.count]
            name = image.key + run.first.to_bytes(4, "little")
            axes = _axes(image.grid) if image.grid else b""
            span = max(image.grid, default=0)
            given.append(
                GivenVectors(
                    *(run.start, rows, axes, span),
                    key=name,
                    mutual=self._mutual,
                )
            )
        return msgspec.structs.replace(request, given=given, images=None)

    # -- details -------------------------------------------------------------------------------

    def _known(self, key: bytes) -> Rows | None:
        rows = self._cache.get(key)
        if rows is not None:
            self._cache.move_to_end(key)
            return rows
        held = (op.rows[key] for op in self._ops.values() if key in op.rows)
        return next(held, None)

    def _keep(self, key: bytes, rows: Rows) -> None:
        if key in self._cache or rows.nbytes > self._cache_bytes:
            return
        self._cache[key] = rows
        self._cached += rows.nbytes
        while self._cached > self._cache_bytes:
            _, oldest = self._cache.popitem(last=False)
            self._cached -= oldest.nbytes

    def _answer_if_whole(self, name: int) -> None:
        if not self._ops[name].left:
            self._send(ImagesEncoded(name))

    def _fail(self, names: Iterable[int]) -> None:
        for name in names:
            self._forget(self._ops.pop(name))
            problem = "the model's image tower fails on an image"
            self._send(ImagesEncoded(name, (), FailureCode.INTERNAL, problem))

    def _forget(self, op: _Op) -> None:
        """Take what this op alone waits for out of the queue; the thread ends what it has begun."""
        others = {key for other in self._ops.values() for key in other.left}
        for key in (op.left & self._queue.keys()) - others:
            os.close(self._queue.pop(key)[1])

    def _feed(self) -> None:
        """Give the thread what it computes next, one image ahead."""
        while self._queue and len(self._computing) < _AHEAD:
            key = next(iter(self._queue))
            self._jobs.put(self._queue.pop(key))
            self._computing.add(key)
            if self._thread is None:
                self._thread = threading.Thread(target=self._compute, name="images", daemon=True)
                self._thread.start()

    def _compute(self) -> None:
        """The thread's life."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device.index or 0)
        while True:
            image, descriptor = self._jobs.get()
            try:
                self._made.append(self._rows(image, descriptor))
            except Exception as error:
                log.exception("the image tower has failed")
                self._made.append(_Made(image.key, error))

    def _rows(self, image: PreparedImage, descriptor: int) -> _Made:
        assert self._tower is not None
        tower = self._tower
        tensors = self._read(image, descriptor)
        # Now: to pin memory takes milliseconds, in which the step loop goes on.
        shape = image.rows, tower.width
        on_gpu = self._device.type == "cuda"
        rows = torch.empty(shape, dtype=tower.dtype, pin_memory=True) if on_gpu else None
        self._turns.begin(sum(tensor.numel() for tensor in tensors.values()))
        try:
            made = tower(tensors, self._turns.piece)
            if made.shape != shape:
                raise ValueError(f"the tower made {made.shape} of an image of {image.rows} rows")
            finite = made.isfinite().all()
            if rows is None:
                return _Made(image.key, made, finite)
            rows.copy_(made, non_blocking=True)
            sent = torch.empty((), dtype=torch.bool, pin_memory=True)
            sent.copy_(finite, non_blocking=True)
            end = Mark(on_gpu)
            end.record()
            return _Made(image.key, rows, sent, end)
        finally:
            self._turns.end()

    def _read(self, image: PreparedImage, descriptor: int) -> dict[str, torch.Tensor]:
        """The tensors of a file, which is closed."""
        try:
            size = os.fstat(descriptor).st_size
            with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as data:
                tensors = {}
                for each in image.tensors:
                    count = int(np.prod(each.shape, dtype=np.int64))
                    found = np.frombuffer(data, each.dtype, count, each.offset)
                    # A copy: nobody else's memory, and none that ends with the file.
                    own = torch.from_numpy(np.empty(each.shape, each.dtype))
                    if self._device.type == "cuda":
                        own = torch.empty_like(own, pin_memory=True)
                    own.numpy()[...] = found.reshape(each.shape)
                    del found  # else the file can't be closed
                    tensors[each.name] = own
                return tensors
        finally:
            os.close(descriptor)


def _axes(grid: Sequence[int]) -> bytes:
    """Positions of an image's rows, as `GivenVectors` has them: one time, line after line."""
    height, width = np.indices(tuple(grid), np.int32).reshape(2, -1)
    return np.stack((np.zeros_like(height), height, width)).astype("<i4").tobytes()


def no_images() -> ImageEncoder:
    """Of an engine without a tower, which is asked for no images."""
    return ImageEncoder(None, torch.device("cpu"), 0, lambda message: None)
