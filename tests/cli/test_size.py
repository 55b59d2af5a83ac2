"""`tokenpod size`, as a process, and against what a real server comes to."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from msgspec import structs

import tokenpod.commands.size
from support.checkpoints import medusa_heads
from support.pods.harness import serve
from tokenpod.commands.gpus import GPUS
from tokenpod.commands.size import SizeError, footprint
from tokenpod.core.capacity import GIB, capacity
from tokenpod.core.cgroup import memory_limits
from tokenpod.core.messages import PROBE_TOKENS, EngineOptions
from tokenpod.core.model_size import ITEM_BYTES, Footprint
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.folder import read_layout
from tokenpod.models.footprint import footprint_of
from tokenpod.models.formats import bytes_needed
from tokenpod.models.weights.shard import Shard
from tokenpod.service.pod.model_store import resolve_model
from tokenpod_client.cli.app import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An 8B model, of which there is only the configuration."""
    folder = tmp_path_factory.mktemp("8b")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@functools.cache
def told_here(
    folder: Path,
    quantize: str | None = None,
    *,
    head: bool = False,
    max_total_tokens: int | None = None,
    mtp: bool = False,
    heads: int | None = None,
    drafts: int = 0,
) -> Footprint:
    """What the command's process would say, which imports torch anew each time."""
    try:
        return footprint_of(
            folder,
            quantize,
            head=head,
            max_total_tokens=max_total_tokens,
            mtp=mtp,
            heads=heads,
            drafts=drafts,
        )
    except ModelError as error:
        raise SizeError(str(error)) from None


@pytest.fixture(autouse=True)
def _without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenpod.commands.size, "footprint", told_here)


def size(*arguments: object) -> subprocess.CompletedProcess[str]:
    """What the command prints, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["size", *map(str, arguments)])
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def answer(*arguments: object, status: int = 0) -> dict:
    done = size(*arguments, "--json")
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout)


@pytest.mark.pod
def test_the_demo_model_has_the_slots_and_parameters_that_the_server_reports():
    with serve("--device", "cpu", "--threads", "1", "--json-output") as server:
        text = server.log.read_text()
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        (reported,) = [line for line in lines if "kv_slots" in line]
    predicted = answer("--cpu", "--memory-gib", 16)
    assert predicted["kv_slots"] == reported["kv_slots"] == 64 * 2048
    assert predicted["parameters"] == reported["parameters"]
    assert predicted["dtype"] == reported["dtype"]


def test_an_8b_model_on_an_h200_has_the_slots_that_were_measured(big: Path):
    found = answer("--model-id", big, "--gpu", "h200", "--max-batch-size", 512)
    assert found["kv_slots"] == pytest.approx(897_272, rel=0.005)
    assert (found["num_shard"], found["dtype"], found["fits"]) == (1, "bfloat16", True)


def test_a_cache_of_8_bits_holds_twice_the_tokens(big: Path):
    usual, half = (
        answer("--model-id", big, "--gpu", "h200", "--kv-cache-dtype", kind)
        for kind in ("auto", "fp8_e4m3")
    )
    assert half["kv_bytes_per_token"] == usual["kv_bytes_per_token"] / 2
    assert half["kv_slots"] == pytest.approx(2 * usual["kv_slots"] + PROBE_TOKENS, abs=1)


def test_a_cache_of_int8_takes_a_scale_per_head_and_token(big: Path):
    each = ("--model-id", big, "--cpu", "--memory-gib", 64, "--kv-cache-dtype")
    usual, small = (answer(*each, kind)["kv_bytes_per_token"] for kind in ("auto", "int8"))
    assert usual == 32 * 2 * 8 * 128 * 4
    assert small == 32 * 2 * 8 * (128 + 4)


def test_products_of_8_bits_take_one_byte_per_number_and_a_scale_per_row(big: Path):
    found = answer("--model-id", big, "--gpu", "h200", "--quantize", "int8")
    hidden, inner, keys, layers = 4096, 14_336, 1024, 32
    products = layers * hidden * (2 * hidden + 2 * keys + 3 * inner)
    rows = layers * (2 * hidden + 2 * keys + 2 * inner + hidden)
    assert found["weight_bytes"] == 2 * (found["parameters"] - products) + products + 4 * rows
    usual = answer("--model-id", big, "--gpu", "h200")
    assert (found["quantize"], usual["quantize"]) == ("int8", "none")
    assert found["weight_bytes"] < 0.6 * usual["weight_bytes"]
    assert found["kv_slots"] > usual["kv_slots"]
    text = size("--model-id", big, "--gpu", "h200", "--quantize", "int8").stdout
    assert "parameters as bfloat16, products as int8 (from config.json)" in text


def test_what_8_bits_take_is_what_the_loader_needs():
    demo = resolve_model("demo", None)
    layout = read_layout(demo, None, quantize="int8")
    for world in (1, 2):
        needed = bytes_needed(layout.weights, Shard(0, world), torch.bfloat16, layout.reader)
        assert told_here(demo, "int8").weight_bytes(world, 2) == needed


def test_the_hosts_memory_holds_tokens_besides(big: Path):
    plain = answer("--model-id", big, "--gpu", "h200")
    found = answer("--model-id", big, "--gpu", "h200", "--host-kv-bytes", 64 << 30)
    assert (plain["host_slots"], found["host_slots"]) == (0, (64 << 30) // (128 << 10))
    assert found["reserve_bytes"]["copies_to_the_host"] == 320 << 20
    # Two ranks of a pod share it, and each has half of a token.
    halves = answer(
        "--model-id", big, "--gpu", "h200", "--host-kv-bytes", 64 << 30, "--num-shard", 2
    )
    assert halves["host_slots"] == found["host_slots"]


def test_a_draft_model_takes_its_weights_and_a_part_of_each_slot(big: Path):
    plain, alone = (answer("--model-id", name, "--gpu", "h200") for name in (big, "demo"))
    drafts = ("--speculate", 4, "--max-total-tokens", 2048)
    ngrams = answer("--model-id", big, "--gpu", "h200", *drafts)
    found = answer("--model-id", big, "--gpu", "h200", *drafts, "--draft-model", "demo")
    of_demo = 8 * 2 * 2 * 64 * 2
    # And drafts that are found early for 16 rows, and what pads them.
    own = 2 * alone["parameters"] + (1 + 16 * 4) * of_demo
    assert found["reserve_bytes"]["draft_model"] == own
    assert found["kv_bytes_per_token"] == plain["kv_bytes_per_token"] + of_demo
    assert found["kv_slots"] < ngrams["kv_slots"]
    assert (
        "draft model 0.0"
        in size("--model-id", big, "--gpu", "h200", *drafts, "--draft-model", "demo").stdout
    )
    missing = size("--model-id", big, "--gpu", "h200", *drafts, "--draft-model", "/no/where")
    assert missing.returncode != 0
    assert "--draft-model is /no/where" in missing.stderr


def test_medusa_heads_take_weights_alone_and_no_slots(tmp_path: Path):
    heads = medusa_heads.save(tmp_path / "heads")
    drafts = "--speculate", 2, "--draft-model", heads
    plain, found = (answer("--model-id", "demo", "--gpu", "h200", *more) for more in ((), drafts))
    each = medusa_heads.BLOCKS * 256 * 257 + 256 * 4096
    assert found["reserve_bytes"]["draft_model"] == 2 * each * ITEM_BYTES[plain["dtype"]]
    assert found["kv_bytes_per_token"] == plain["kv_bytes_per_token"]
    more = size("--model-id", "demo", "--gpu", "h200", *drafts, "--speculate", 5)
    assert "it has 4 heads, which guess a token each, and --speculate is 5" in more.stderr


def test_slots_for_adapters_are_counted(big: Path):
    """81,920 numbers for each unit of rank in each of 32 layers."""
    plain = answer("--model-id", big, "--gpu", "h200")
    found = answer("--model-id", big, "--gpu", "h200", "--max-adapters", 8)
    assert "adapters" not in plain["reserve_bytes"]
    factors, outputs = 8 * 64 * 32 * 81_920 * 2, 32 * 43_008
    assert found["reserve_bytes"]["adapters"] == factors + (8 + 1) * outputs * 4
    assert found["kv_slots"] < plain["kv_slots"]
    heads = answer(
        *("--model-id", big, "--gpu", "h200", "--max-adapters", 8, "--max-adapter-heads", 2)
    )
    tables = heads["reserve_bytes"]["adapter_embeddings_and_heads"]
    assert tables == 2 * 2 * 128_256 * 4096 * 2
    factors = answer(
        *("--model-id", big, "--gpu", "h200", "--max-adapters", 8, "--lora-vocabulary")
    )
    own = factors["reserve_bytes"]["lora_on_embedding_and_head"]
    assert own == 8 * 64 * 2 * (128_256 + 4096) * 2
    without = size("--model-id", big, "--gpu", "h200", "--lora-vocabulary")
    assert "--lora-vocabulary is set: --max-adapters is 0" in without.stderr


def test_keys_and_values_that_are_made_of_latents_are_counted(tmp_path: Path):
    """DeepSeek V2 Lite: 16 heads, rows of 576 numbers, 640 for each head while it is expanded."""
    latents = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": 102_400,
        "hidden_size": 2048,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 163_840,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(latents))
    portions = told_here(tmp_path).portions
    assert portions[1].kv_numbers == portions[2].kv_numbers == 27 * 576
    few = ("--model-id", tmp_path, "--gpu", "h200", "--max-batch-size", 64)
    long, short = (answer(*few, "--max-total-tokens", n)["reserve_bytes"] for n in (100_000, 2048))
    tokens = 65 + 4096 + PROBE_TOKENS
    made = 16 * 16_384 * 640 + 16_384 * 576 + 2048 * tokens
    widest = 3 * tokens * (6 + 2) * 1408
    assert made > widest
    assert long["largest_step"] - short["largest_step"] == 2 * (made - widest)
    for world, heads in ((1, 16), (4, 4)):
        expansion = portions[world].expansion
        assert expansion is not None
        assert expansion.numbers(100_000, "cuda") == heads * 16_384 * 640 + 16_384 * 576
        assert expansion.numbers(100_000, "cpu") == 65_536 * 640 + 16_384 * 576
        assert expansion.numbers(2048, "cuda") == 2048 * (heads * 640 + 576)


def test_states_that_a_model_keeps_by_itself_are_counted(tmp_path: Path):
    """Mamba 2 by transformers: by layer what a convolution saw last, and heads' states."""
    recurrent = {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "dtype": "float32",
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_heads": 8,
        "head_dim": 64,
        "state_size": 32,
        "n_groups": 1,
        "vocab_size": 500,
        "time_step_limit": [0.0, 100.0],
    }
    (tmp_path / "config.json").write_text(json.dumps(recurrent))
    asked = ("--model-id", tmp_path, "--cpu", "--memory-gib", 1, "--max-total-tokens", 1000)
    found = answer(*asked, "--max-batch-size", 100)
    state = 6 * 4 * (4 * (512 + 2 * 32) + 8 * 64 * 32)
    assert found["state_bytes_per_sequence"] == state
    assert found["reserve_bytes"]["states"] == int(101 * 2 * state / 0.9)
    assert (found["kv_bytes_per_token"], found["sequences_at_once"]) == (8, 100)
    text = size(*asked, "--max-batch-size", 100).stdout
    assert "100,000 tokens of 0.0078125 KiB, and 100 states of 438 KiB" in text
    little = (*asked[:4], 0.77, *asked[5:])
    assert "a sequence's state takes 0.00 GiB, and there is no room" in size(*little).stdout


def test_a_tower_of_images_is_counted_where_images_are_served(big: Path):
    """On the first rank: its weights, and what the largest image takes."""
    plain = told_here(big)
    seeing = structs.replace(plain, tower_numbers=600_000_000, tower_working=200_000_000)
    shape = {"max_batch_size": 64, "max_batch_prefill_tokens": 2048, "image_cache_bytes": 0}
    options = EngineOptions("", "bfloat16", "cuda:0", 1, **shape)
    found, without = (capacity(x, options, memory=80 * GIB, ranks=1) for x in (seeing, plain))
    assert found.reserve["image tower"] == 2 * 600_000_000
    assert found.reserve["an image"] == 2 * 200_000_000
    assert found.slots < without.slots
    blind = structs.replace(options, image_cache_bytes=None)
    assert "image tower" not in capacity(seeing, blind, memory=80 * GIB, ranks=1).reserve


def test_an_encoder_takes_no_cache(tmp_path: Path):
    """However many tokens are asked for, and with the host's memory, too."""
    encoder = {
        **{"architectures": ["BertModel"], "hidden_size": 768, "num_hidden_layers": 12},
        **{"num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 30_522},
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(encoder))
    asked = "--model-id", tmp_path, "--memory-gib", 4, "--max-batch-total-tokens", 10**6
    found = answer(*asked, "--host-kv-bytes", 10**9)
    assert (found["kv_bytes_per_token"], found["kv_slots"]) == (0, 10**6)
    assert "none: texts are read as a whole, 1,000,000 tokens at once" in size(*asked).stdout


def test_experts_of_8_bits_are_counted(tmp_path: Path):
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    mixture = CONFIG | experts | {"architectures": ["MixtralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(mixture))
    asked = ("--model-id", tmp_path, "--memory-gib", 200)
    usual, small = (answer(*asked, *more) for more in ((), ("--quantize", "int8")))
    assert small["parameters"] == usual["parameters"]
    assert 0.5 < small["weight_bytes"] / usual["weight_bytes"] < 0.53


def test_without_a_number_the_fewest_shards_that_fit_are_taken(big: Path):
    found = answer("--model-id", big, "--memory-gib", 14.56)
    assert (found["num_shard"], found["least_num_shard"]) == (2, 2)


def test_a_pod_of_several_shards_is_asked_about_its_group(
    big: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TOKENPOD_NUM_SHARD", "2")
    monkeypatch.setenv("TOKENPOD_NUM_NODES", "2")
    monkeypatch.setenv("TOKENPOD_MASTER_ADDR", "tokenpod-0")
    assert answer("--model-id", big, "--gpu", "h200")["num_shard"] == 4
    assert answer("--model-id", big, "--gpu", "h200", "--num-shard", 1)["num_shard"] == 1


def test_what_does_not_fit_is_exit_status_1_and_says_what_would(big: Path):
    done = size("--model-id", big, "--memory-gib", 14.56, "--num-shard", 1)
    assert done.returncode == 1
    assert "It does not fit: weights and reserve need 16." in done.stdout
    assert "GiB of 14.56." in done.stdout
    assert done.stdout.endswith("The least that does is --num-shard 2.\n")


def test_a_model_that_no_number_of_shards_fits(big: Path):
    done = size("--model-id", big, "--memory-gib", 1)
    assert done.returncode == 1
    assert done.stdout.endswith("No number of shards does.\n")
    assert answer("--model-id", big, "--memory-gib", 1, status=1)["least_num_shard"] is None


def test_shards_that_cannot_divide_the_model_are_refused(big: Path):
    done = size("--model-id", big, "--gpu", "h200", "--num-shard", 3)
    assert done.returncode == 1
    assert done.stderr == (
        "error: --num-shard is 3: this model can be divided among 1, 2, 4, 8, 16, 32 shards\n"
    )


def test_sequences_at_once_are_counted_for_the_lengths_that_were_asked_for(big: Path):
    found = answer("--model-id", big, "--gpu", "h200", "--length", 1000, "--length", 100)
    slots = found["kv_slots"]
    assert found["sequences"] == [
        {"tokens": 1000, "at_once": min(slots // 1000, 1024)},
        {"tokens": 100, "at_once": 1024},
    ]


def test_lengths_that_the_cache_cannot_hold_are_told(big: Path):
    lengths = ("--length", 8192, "--length", 131_072)
    done = size("--model-id", big, "--gpu", "rtx-4090", *lengths)
    assert done.returncode == 0
    *_, short, long, _, verdict = done.stdout.splitlines()
    assert (short.split()[0], long.split()) == ("8,192", ["131,072", "none"])
    longest = int(answer("--model-id", big, "--gpu", "rtx-4090")["longest_sequence"])
    assert 8192 * int(short.split()[1]) <= longest < 131_072
    assert verdict == (
        f"It fits, with sequences of {longest:,} tokens at most; the model's context is 131,072."
    )


def test_people_get_a_table(big: Path):
    done = size("--model-id", big, "--gpu", "h200", "--length", 8192)
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert lines[0] == (
        "model    LlamaForCausalLM, 8,030,261,248 parameters as bfloat16 (from config.json)"
    )
    assert lines[1] == "device   h200, 139.80 GiB"
    assert "weights            14.96  all read in 3.35 ms at 4,800 GB/s" in lines
    assert any(line.split() == ["8,192", "107"] for line in lines)
    assert lines[-1] == "It fits."


@pytest.mark.parametrize(
    ("flags", "status", "reported"),
    [
        (["--gpu", "h900"], 2, "is h900: it must be one of t4, l4,"),
        (["--gpu", "h200", "--memory-gib", "4"], 2, "goes without --cpu and --memory-gib"),
        (["--gpu", "h200", "--max-total-tokens", "1"], 2, "--max-total-tokens is 1"),
        (["--gpu", "h200", "--model-id", "/nowhere"], 1, "there is no such folder"),
        (["--gpu", "h200", "--num-shard", "0"], 2, "--num-shard"),
        (["--gpu", "t4"], 1, "t4 has compute capability 7.5; the kernels need 8.0"),
        (["--gpu", "a100-80", "--kv-cache-dtype", "fp8_e4m3"], 1, "and this one has 8.0"),
        (["--cpu", "--memory-gib", "4", "--kv-cache-dtype", "fp8_e4m3"], 2, "it needs a GPU"),
        (["--gpu", "h200", "--kv-cache-dtype", "int8"], 2, "it is for CPUs"),
    ],
)
def test_what_an_operator_gets_wrong_is_a_line(flags: list[str], status: int, reported: str):
    done = size(*flags)
    assert done.returncode == status
    assert reported in done.stderr
    assert all(line.startswith("error: ") for line in done.stderr.splitlines())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_where_there_is_no_gpu_the_default_is_this_cpu_and_its_memory():
    done = size("--model-id", "demo", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["device"].startswith("this CPU")
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [limit.limit for limit in memory_limits()]
    assert found["memory_bytes"] == min([machine, *limits])


@pytest.mark.pod
def test_a_model_that_could_not_be_served_is_refused_in_the_loaders_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tokenpod.commands.size, "footprint", footprint)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    done = size("--gpu", "h200", "--model-id", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: config.json: hidden_size is missing")


@pytest.mark.pod
def test_the_command_itself_does_not_import_torch(big: Path):
    code = (
        "import sys; from tokenpod_client.cli.app import main;"
        f"status = main(['size', '--gpu', 'h200', '--model-id', {str(big)!r}]);"
        "sys.exit(status or ('torch' in sys.modules) * 9)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, timeout=120)
    assert done.returncode == 0


def test_a_gpu_has_a_little_less_than_its_name_says():
    said = {"t4": 16, "l4": 24, "a100-40": 40, "l40s": 48, "a100-80": 80, "h100": 80}
    said |= {"h200": 141, "b200": 192, "a10g": 24, "rtx-3090": 24, "rtx-4090": 24}
    said |= {"rtx-5090": 32, "rtx-6000-ada": 48, "rtx-pro-6000": 96}
    assert set(GPUS) == set(said)
    for name, gb in said.items():
        assert 0.9 * gb < GPUS[name].memory / GIB < gb


def test_the_page_says_where_each_bandwidth_comes_from():
    page = (Path(__file__).parents[2] / "docs" / "sizing.md").read_text()
    rows = re.findall(r"^\| ([a-z0-9-]+) \| ([\d,]+) \| (.+) \|$", page, re.MULTILINE)
    assert [name for name, *_ in rows] == list(GPUS)
    for name, bandwidth, source in rows:
        assert int(bandwidth.replace(",", "")) == GPUS[name].bandwidth
        if found := re.match(r"([\d,]+) bits at ([\d.]+) Gbit/s", source):
            bits, rate = int(found[1].replace(",", "")), float(found[2])
            assert abs(bits * rate / 8 - int(bandwidth.replace(",", ""))) < 3
