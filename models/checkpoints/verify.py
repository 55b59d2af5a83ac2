"""Digests of a model's files, compared with its manifest while the weights are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenpod.core.manifest import MANIFEST, ManifestError, check_file, read_manifest
from tokenpod.core.model_files import small_files
from tokenpod.models.checkpoints.errors import ModelError

#: Files whose digests are computed at once; hashing does without the interpreter's lock.
_THREADS = 4


@contextlib.contextmanager
def verified(
    folder: Path, weights: Iterable[Path], *, required: bool, share: tuple[int, int] = (0, 1)
) -> Iterator[None]:
    """Compare files with the folder's manifest while the body runs; it ends once all are right.

    The files are read twice, but the second time mostly from the page cache. Ranks of one host
    divide them, so that each file is hashed once per host.

    Args:
        folder: the model's; without a manifest nothing is compared.
        weights: the checkpoint's files. All others that a server reads are compared too.
        required: refuse a folder without a manifest.
        share: which of how many ranks of this host this is.

    Raises ModelError with the file and both digests.
    """
    try:
        digests = read_manifest(folder)
        if digests is None:
            if required:
                raise ModelError(f"{folder} has no {MANIFEST}, and --require-manifest is set")
            yield
            return
        names = [*(path.name for path in weights), *small_files(folder)]
        own = names[share[0] :: share[1]]
        with ThreadPoolExecutor(_THREADS, "digest") as pool:
            checks = [pool.submit(check_file, folder, name, digests) for name in own]
            try:
                yield
                for check in checks:
                    check.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
    except ManifestError as error:
        raise ModelError(str(error)) from None
