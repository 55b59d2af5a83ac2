"""The table of knobs: a field more is a column more, on the host and on the device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, get_type_hints

import msgspec
import pytest
import torch

from support.sampling.samplers import (
    ALONE,
    DEVICE,
    SMALL,
    asking,
    on_cpu,
    on_device,
    random_logits,
    step,
)
from tokenpod.core.new_row import NewRow
from tokenpod.core.sampling import (
    COUNTED,
    CUTS,
    DRAWS,
    EDITED,
    PROCESSED_TOPS,
    REPORTED,
    ROW_WORDS,
    TABLE,
    Knob,
    RowValues,
    SamplingParams,
    SamplingTable,
    Stage,
)
from tokenpod.engine.cpu.cpu_sampler import CpuSampler
from tokenpod.engine.gpu.device_sampler import DeviceSampler
from tokenpod_client.protos.generate.v3 import generate_pb2 as v3
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
LEVELS = ("core", "scheduler", "kernels", "models", "engine", "service", "protos")


class MoreParams(SamplingParams, frozen=True, array_like=True):
    """One knob more than the server has."""

    loudness: Annotated[float, Knob(Stage.COUNT, 0, 10, stored=lambda x: x * 2)] = 1.0


MORE = SamplingTable(MoreParams)


def flags_of(params: SamplingParams, table: SamplingTable = TABLE, **values: int) -> int:
    row = table.row(params, RowValues(**values)).view(table.dtype)
    return int(row["flags"][0])


def louder(row: NewRow, loudness: float) -> NewRow:
    fields = msgspec.structs.asdict(row.request.sampling)
    params = MoreParams(**fields, loudness=loudness)
    request = msgspec.structs.replace(row.request, sampling=params)
    return NewRow(request, row.stream, row.outputs)


def test_one_more_knob_is_one_more_column_on_the_host_and_on_the_device():
    rows = [louder(asking(SamplingParams()), loudness) for loudness in (3.5, 1.0)]
    host = CpuSampler(rows=2, vocab_size=8, table=MORE)
    device = DeviceSampler(rows=2, vocab_size=8, device=DEVICE, tiles=SMALL, table=MORE)
    for sampler in (host, device):
        sampler.set_rows([0, 1], rows)
        assert sampler.columns["loudness"].tolist() == [7.0, 2.0]
        assert sampler.columns["flags"].tolist() == [EDITED | COUNTED | REPORTED, REPORTED]
    words = device.device_words[:2].cpu().view(torch.float64)
    assert words[:, MORE.place("loudness")].tolist() == [7.0, 2.0]


def test_one_more_knob_moves_no_other_and_changes_no_draw():
    rows = [ALONE[i] for i in (1, 7, 8, 17, 35)]
    logits = random_logits(len(rows), 97)
    usual = (
        on_cpu(rows, 97).sample(logits, [0, 1, 2, 3, 4], [0] * 5),
        step(on_device(rows, 97), logits),
    )
    host = CpuSampler(rows=5, vocab_size=97, table=MORE)
    device = DeviceSampler(rows=5, vocab_size=97, device=DEVICE, tiles=SMALL, table=MORE)
    for at, (params, changes) in enumerate(rows):
        for sampler in (host, device):
            sampler.set_rows([at], [louder(asking(params, **changes), loudness=1.0)])
    more = host.sample(logits, [0, 1, 2, 3, 4], [0] * 5), step(device, logits)
    for before, after in zip(usual, more, strict=True):
        assert torch.equal(before.tokens, after.tokens)
        assert torch.equal(before.logprobs, after.logprobs)


def test_a_row_has_room_for_so_many_columns():
    spare = ROW_WORDS - 1 - len(RowValues._fields) - len(TABLE.columns)

    def table_of(more: int) -> SamplingTable:
        fields = [(f"k{i}", Annotated[float, Knob(Stage.LUCK)], 0.0) for i in range(more)]
        params = msgspec.defstruct(
            "Params", fields, bases=(SamplingParams,), frozen=True, array_like=True
        )
        return SamplingTable(params)

    assert table_of(spare).place(f"k{spare - 1}") == ROW_WORDS - 1
    with pytest.raises(ValueError, match=f"{ROW_WORDS + 1} columns; .* {ROW_WORDS} words"):
        table_of(spare + 1)


@pytest.mark.parametrize(
    ("params", "values", "flags"),
    [
        (SamplingParams(), {}, 0),
        (SamplingParams(temperature=0.5, seed=7), {}, 0),
        (SamplingParams(top_k=5), {}, 0),
        (SamplingParams(do_sample=True), {}, DRAWS),
        (SamplingParams(do_sample=True, min_p=0.1), {}, DRAWS | CUTS),
        (SamplingParams(watermark=True), {}, EDITED),
        (SamplingParams(logit_bias={3: 1.0}), {}, EDITED),
        (SamplingParams(presence_penalty=0.1), {}, EDITED | COUNTED),
        (SamplingParams(), {"min_new_tokens": 1}, EDITED),
        (SamplingParams(top_of_processed=True), {}, 0),
        (SamplingParams(top_of_processed=True), {"top_n": 1}, PROCESSED_TOPS | REPORTED),
        (SamplingParams(), {"logprobs": 1}, REPORTED),
        (SamplingParams(), {"ranks": 1}, REPORTED),
    ],
    ids=str,
)
def test_what_a_row_needs_follows_from_the_knobs_that_are_not_neutral(params, values, flags):
    assert flags_of(params, **values) == flags


def test_every_knob_is_annotated_and_every_field_of_the_proto_is_one():
    hints = get_type_hints(SamplingParams, include_extras=True)
    assert [column.name for column in TABLE.columns] == list(hints)
    ours = {"relative_frequency_penalty", "top_of_processed"}  # of the shard protocol
    samples = {"n", "best_of"}
    searches = {"beam"}
    ours |= {"eos_boost_after", "eos_boost_factor"}  # of `stopping.eos_boost`
    later = {"allowed_token_ids", "bad_words"}  # since generate.v3 takes no more
    assert {*hints} - ours - later == {*v3.SamplingOptions.DESCRIPTOR.fields_by_name} - samples
    fields = {*pb.SamplingOptions.DESCRIPTOR.fields_by_name}
    assert {*hints} - ours == fields - samples - searches


def test_docs_extend_names_the_five_files_that_a_knob_touches():
    pages = (ROOT / "docs/extend.md").read_text()
    section = pages.split("## Add a sampling knob")[1].split("\n## ")[0]
    told = set(re.findall(r"^\d\. \[.*\]\(\.\./(.*?)\)", section, re.MULTILINE))
    named = {
        str(path.relative_to(ROOT))
        for level in LEVELS
        for path in (ROOT / level).rglob("*.p*")
        if path.suffix in (".py", ".proto") and "_pb2" not in path.name
        if re.search(r"\bpresence_penalty\b", path.read_text())
    }
    # Traces carry the knobs that a convention has names for; generate.v3 takes no more knobs.
    others = {"service/telemetry/tracing.py", "protos/generate/v3/generate.proto"}
    assert named - others == told
    assert len(told) == 5
