"""Rows of images: computed by a thread beside the step loop, kept under a limit of bytes.

    EncodeImages(op) -> rows known? ---------------------------------> kept for op -> ImagesEncoded
                          | no, and no tensors came -----------------> ImagesEncoded(missing)
                          | no: the thread lets the tower compute them ^
    Request(images of op) -> its rows become given embeddings; op is forgotten
    DropImages(op)        -> op is forgotten, also while the tower computes

One image at a time goes through the tower, so its rows never depend on its company. On a GPU the
thread has a stream of its own: steps go on between the tower's kernels.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from tokenpod.core.images import DropImages, EncodeImages, ImagesEncoded, PreparedImage
from tokenpod.core.outputs import FailureCode
from tokenpod.core.requests import GivenVectors, Request

if TYPE_CHECKING:
    from tokenpod.models.towers.tower import Tower

log = logging.getLogger("tokenpod.engine")

#: Images that the thread has: the one that it computes, and the next.
_AHEAD = 2

#: [n, width] on the host.
Rows = torch.Tensor
#: What the thread has made of an image, by key; an exception, if it failed.
_Made = tuple[bytes, Rows | Exception]


@dataclass(slots=True)
class _Op:
    """A request's images on their way."""

    images: list[PreparedImage]
    #: Keys that the tower has yet to compute.
    left: set[bytes]
    rows: dict[bytes, Rows] = field(default_factory=dict)


class ImageEncoder:
    """Computes and keeps the rows of images. The step loop alone calls it; it never waits.

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
        self._made: SimpleQueue[_Made] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether the tower computes, so that somebody must look for its end."""
        return bool(self._queue or self._computing)

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
        while not self._made.empty():
            key, made = self._made.get()
            self._computing.discard(key)
            self._feed()
            waiting = [name for name, op in self._ops.items() if key in op.left]
            if isinstance(made, Exception):
                self._fail(waiting)
                continue
            self._keep(key, made)
            for name in waiting:
                op = self._ops[name]
                op.rows[key] = made
                op.left.discard(key)
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
        with self._own_stream():
            while True:
                image, descriptor = self._jobs.get()
                try:
                    self._made.put((image.key, self._rows(image, descriptor)))
                except Exception as error:
                    log.exception("the image tower has failed")
                    self._made.put((image.key, error))

    def _rows(self, image: PreparedImage, descriptor: int) -> Rows:
        assert self._tower is not None
        try:
            size = os.fstat(descriptor).st_size
            with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as data:
                # A copy: nobody else's memory, and none that ends with the file.
                tensors = {
                    each.name: torch.from_numpy(
                        np.frombuffer(
                            data, each.dtype, int(np.prod(each.shape, dtype=np.int64)), each.offset
                        )
                        .reshape(each.shape)
                        .copy()
                    )
                    for each in image.tensors
                }
        finally:
            os.close(descriptor)
        rows = self._tower(tensors)
        if rows.shape != (image.rows, self._tower.width):
            raise ValueError(f"the tower made {rows.shape} of an image of {image.rows} rows")
        return rows

    def _own_stream(self) -> Any:
        if self._device.type != "cuda":
            return contextlib.nullcontext()
        torch.cuda.set_device(self._device.index or 0)
        cuda: Any = torch.cuda
        return cuda.stream(cuda.Stream(self._device))


def _axes(grid: Sequence[int]) -> bytes:
    """Positions of an image's rows, as `GivenVectors` has them: one time, line after line."""
    height, width = np.indices(tuple(grid), np.int32).reshape(2, -1)
    return np.stack((np.zeros_like(height), height, width)).astype("<i4").tobytes()


def no_images() -> ImageEncoder:
    """Of an engine without a tower, which is asked for no images."""
    return ImageEncoder(None, torch.device("cpu"), 0, lambda message: None)
