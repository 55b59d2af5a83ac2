"""Images before the model: what is refused by their headers, and what workers make of the rest."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
from PIL import Image

from support.images.files import file_of, hostile, moving, picture, png, sideways, webp_canvas
from support.images.seeing import SEEING_KINDS, write_processor
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.calls.images import GivenImage
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.images.expansions import rows_of
from tokenpod.service.images.image_messages import TensorFile
from tokenpod.service.images.image_reader import MOST_RATIO, ImageWorkers, check_image
from tokenpod.service.images.image_worker import Processor

pytestmark = [pytest.mark.pod, pytest.mark.asyncio(loop_scope="module")]

FIELD = "chat.messages[0].content[1].image.data"
SIDE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a worker reads of a model: CLIP's processor, with images of 16 x 16."""
    made = tmp_path_factory.mktemp("llava")
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": SIDE},
        "crop_size": {"height": SIDE, "width": SIDE},
    }
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "vision_config": {"model_type": "clip_vision_model", "patch_size": 8},
    }
    (made / "preprocessor_config.json").write_text(json.dumps(processor))
    (made / "config.json").write_text(json.dumps(config))
    return made


@asynccontextmanager
async def pool(folder: Path, **more: Any) -> AsyncIterator[ImageWorkers]:
    """One worker."""
    workers = await ImageWorkers.start(folder, ServerSettings(image_workers=1, **more))
    try:
        yield workers
    finally:
        await workers.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(folder: Path) -> AsyncIterator[ImageWorkers]:
    """One worker, for tests that do not end it."""
    async with pool(folder) as made:
        yield made


async def read(workers: ImageWorkers, data: bytes, **more: Any) -> TensorFile:
    """By way of all checks."""
    header = check_image(GivenImage(data, FIELD), ServerSettings(**more))
    return await workers.read(data, header, field=FIELD)


def numbers(made: TensorFile, name: str = "pixel_values") -> np.ndarray:
    """What its file has, and no more of the file."""
    (place,) = (place for place in made.tensors if place.name == name)
    with open(made.descriptor, "rb", closefd=False) as file:
        data = file.read()
    assert len(data) == made.size
    count = int(np.prod(place.shape))
    return np.frombuffer(data, place.dtype, count, place.offset).reshape(place.shape)


async def test_tensors_are_those_of_the_models_processor(
    folder: Path, workers: ImageWorkers
) -> None:
    from transformers import AutoImageProcessor

    images = {
        "plain": file_of(picture(50, 30)),
        "alpha": file_of(picture(50, 30, 3, "RGBA"), "WEBP", lossless=True),
        "palette": file_of(picture(9, 31, 4, "P")),
        "print": file_of(picture(30, 50, 5, "CMYK"), "JPEG"),
        "dot": file_of(picture(1, 1)),
        "flat": file_of(picture(40, 3)),
    }
    process = AutoImageProcessor.from_pretrained(folder, backend="pil")
    for data in images.values():
        made = await read(workers, data)
        assert made.layout == (("", (SIDE // 8) ** 2),)
        image = Image.open(io.BytesIO(data)).convert("RGB")
        truth = process(image, return_tensors="np")["pixel_values"]
        assert np.array_equal(numbers(made), truth)
    assert len(workers.processor) == 32


async def test_an_image_is_turned_as_its_file_says(workers: ImageWorkers) -> None:
    upright = picture(40, 24, 8)
    turned = numbers(await read(workers, sideways(upright)))
    plain = numbers(await read(workers, file_of(upright)))
    assert np.abs(turned - plain).mean() < 0.1 < np.abs(turned[..., ::-1] - plain).mean()


async def test_sixteen_bits_of_grey_are_as_bright_as_eight(workers: ImageWorkers) -> None:
    eight = picture(40, 24, 8, "L")
    sixteen = Image.fromarray(np.asarray(eight).astype(np.uint16) * 257)
    deep = file_of(sixteen)
    assert deep[24] == 16  # bits of a number
    plain = numbers(await read(workers, file_of(eight)))
    assert np.array_equal(numbers(await read(workers, deep)), plain)


UNREADABLE = {
    "cut": (file_of(picture(64, 64), "JPEG")[:-300], "is a JPEG by its header, and is cut off"),
    "short": (file_of(picture(64, 64))[:-200], "is a PNG by its header, and "),
    "rows": (png(9, 9, bytes(3)), "is a PNG by its header, and "),
    "depth": (png(9, 9, bytes(9 * 28), depth=7), "is a PNG by its header, and can't be decoded"),
    "frames": (moving("PNG"), "has 2 frames; images of one frame are taken"),
    "lies": (
        webp_canvas(file_of(picture(8, 8), "WEBP", icc_profile=bytes(9)), 99, 8),
        "is a WEBP by its header, and can't be decoded",
    ),
}


@pytest.mark.parametrize("name", UNREADABLE)
async def test_what_cant_be_decoded_is_refused_and_the_next_is_read(
    workers: ImageWorkers, name: str
) -> None:
    data, problem = UNREADABLE[name]
    before = {worker.pid for worker in workers._workers}
    with pytest.raises(InvalidArgument, match=problem) as refused:
        await read(workers, data)
    assert str(refused.value).startswith(FIELD)
    numbers(await read(workers, file_of(picture(9, 9))))
    assert {worker.pid for worker in workers._workers} == before


async def test_time_and_memory_are_limited(folder: Path) -> None:
    large = file_of(picture(3500, 3500, mode="L"), compress_level=1)
    async with pool(folder, image_timeout=0.02) as workers:
        with pytest.raises(InvalidArgument, match=r"more than 0.02 s \(--image-timeout\)"):
            await read(workers, large)
    async with pool(folder, image_memory_bytes=64 * 1024**2) as workers:
        with pytest.raises(InvalidArgument, match=r"bytes of memory \(--image-memory-bytes\)"):
            await read(workers, large)
        numbers(await read(workers, file_of(picture(9, 9))))


async def _survive(workers: ImageWorkers, count: int, seed: int) -> None:
    read_ones, refused, sizes = 0, 0, []
    (before,) = (worker.pid for worker in workers._workers)
    for at, data in enumerate(hostile(count, seed)):
        if at in (count // 2, count - 1):
            sizes.append(psutil.Process(before).memory_info().rss)
        try:
            made = await read(workers, data)
        except InvalidArgument as error:
            text = str(error)
            assert text.startswith(f"{FIELD} ")
            # Addresses of objects, and failures that are ours.
            assert not any(part in text for part in ("0x", "(--image", "image processor"))
            refused += 1
        else:
            assert np.isfinite(numbers(made)).all()
            made.close()
            read_ones += 1
    # Nothing has ended it.
    assert [worker.pid for worker in workers._workers] == [before]
    assert read_ones > count // 10
    assert refused > count // 2
    assert sizes[1] < sizes[0] + 32 * 1024**2


async def test_hostile_files_harm_nobody(workers: ImageWorkers) -> None:
    await _survive(workers, 100, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SEEING_KINDS)
async def test_many_hostile_files_harm_nobody(kind: str, tmp_path: Path) -> None:
    write_processor(kind, tmp_path)
    async with pool(tmp_path) as workers:
        await _survive(workers, 2000 if kind == "internvl" else 200, 2)


@pytest.mark.parametrize("kind", SEEING_KINDS)
async def test_every_processor_takes_every_form(kind: str, tmp_path: Path) -> None:
    """From one pixel to strips: as many rows as say the tensors, and all numbers are some."""
    write_processor(kind, tmp_path)
    process = Processor(tmp_path)
    for width, height in ((1, 1), (1, MOST_RATIO), (MOST_RATIO, 1), (2, 399), (301, 3), (97, 101)):
        tensors = process(np.asarray(picture(width, height, 7)))
        assert rows_of(process.layout(tensors)) > 0
        assert all(np.isfinite(each).all() for each in tensors.values())
