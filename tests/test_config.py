"""Settings: where they come from, what they refuse, and that the documentation is about them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from tokenpod.service.config.rules import flag
from tokenpod.service.config.settings import Group, descriptions, group_of
from tokenpod.service.config.sources import (
    LAUNCHER_VARIABLES,
    ServerSettings,
    SettingsError,
    load_settings,
    unknown_variables,
    variable,
)

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("TOKENPOD_") or name in LAUNCHER_VARIABLES.values():
            monkeypatch.delenv(name)


def fault(**flags: object) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(**flags)
    return str(caught.value)


def test_defaults_are_tgis_where_tgi_has_them():
    s = load_settings()
    assert (s.max_best_of, s.max_stop_sequences, s.max_top_n_tokens) == (2, 4, 5)
    assert (s.model_id, s.port, s.health_port) == ("demo", 50051, 50052)
    assert s.graceful_termination_timeout == 90


def test_what_may_wait_follows_what_runs_and_what_the_cache_holds():
    s = load_settings(device="cpu")
    assert s.resolved_concurrent_requests == 4 * s.resolved_batch_size == 256
    assert load_settings(max_batch_size=512).resolved_concurrent_requests == 2048
    assert [s.resolved_queue_tokens(slots) for slots in (100, 900_000)] == [131_072, 900_000]
    given = load_settings(max_concurrent_requests=3, max_queue_tokens=50)
    assert (given.resolved_concurrent_requests, given.resolved_queue_tokens(900_000)) == (3, 50)


def test_a_file_has_the_settings_by_their_names_and_all_else_wins_over_it(monkeypatch, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("max-best-of: 5\nmax_top_n_tokens: 9\nport: 1234\nrevision: null\n")
    monkeypatch.setenv("TOKENPOD_CONFIG", str(path))
    monkeypatch.setenv("TOKENPOD_PORT", "77")
    s = load_settings(max_top_n_tokens=3)
    assert (s.max_best_of, s.max_top_n_tokens, s.port, s.revision) == (5, 3, 77, None)
    monkeypatch.delenv("TOKENPOD_CONFIG")
    assert load_settings(config=path).port == 77
    monkeypatch.delenv("TOKENPOD_PORT")
    assert load_settings(config=path).port == 1234


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("max-best-of: 0", "max-best-of in --config is 0: it should be greater than or equal to 1"),
        ("max-bestof: 3", "--config is {path}: there is no setting max-bestof"),
        ("config: other.yaml", "--config is {path}: there is no setting config"),
        ("- port", "--config is {path}: it must have settings by name, as port: 50051"),
        ("", "--config is {path}: it must have settings by name, as port: 50051"),
        ("port: [", "--config is {path}: it can't be read (while parsing"),
        ("!!python/object:os.system {}", "--config is {path}: it can't be read (could not"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_by_its_name(tmp_path, text, problem):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    told = fault(config=path)
    assert told.startswith(problem.format(path=path))
    assert "\n" not in told


def test_a_setting_that_was_removed_is_refused_with_what_to_use_instead(monkeypatch, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("draft-tree: 31")
    instead = "drafts of a sequence are a chain now; --speculate alone says how many"
    assert fault(config=path) == f"--config is {path}: draft-tree was removed: {instead}"
    monkeypatch.setenv("TOKENPOD_DRAFT_TREE", "31")
    assert fault() == f"TOKENPOD_DRAFT_TREE is 31: it was removed: {instead}"
    monkeypatch.setenv("TOKENPOD_DRAFT_TREE", "")
    load_settings()


def test_a_file_that_is_not_there_is_named():
    assert fault(config="/no/such").startswith("--config is /no/such: it can't be read (No such")


def test_a_flag_wins_over_its_variable_and_a_variable_over_the_default(monkeypatch):
    monkeypatch.setenv("TOKENPOD_MAX_BEST_OF", "7")
    assert load_settings().max_best_of == 7
    assert load_settings(max_best_of=3).max_best_of == 3


def test_every_setting_can_be_given_as_a_variable(monkeypatch, tmp_path):
    (tmp_path / "pem").write_text("x")
    pem = str(tmp_path / "pem")
    files = ("tls_cert", "tls_key", "tls_client_ca", "auth_token_file")
    files += ("adapter_token_file", "admin_token_file")
    files += ("shard_tls_cert", "shard_tls_key", "shard_tls_ca")
    (tmp_path / "settings.yaml").write_text("port: 50051")
    odd = dict.fromkeys(files, pem) | {"config": str(tmp_path / "settings.yaml")}
    odd |= {"kv_cache_dtype": "fp8_e4m3", "device": "cuda", "dtype": "float16"}
    odd |= {"quantize": "int8", "unknown_fields": "ignore", "config_override": "{}"}
    odd |= {"log_level": "error", "json_output": "true", "prefix_caching": "false"}
    odd |= {"prefix_eviction": "lfu"}
    odd |= {
        "require_manifest": "true",
        "quantize_head": "true",
        "kv_cache_events": "true",
        "generation_config": "none",
        "tool_parser": "hermes",
        "reasoning_parser": "think",
    }
    odd |= {"adapter_folder": str(tmp_path), "lora_adapters": "a=b", "lora_fuse": "true"}
    odd |= {"lora_vocabulary": "true"}
    odd |= {"max_router_message_bytes": "2048", "max_front_end_bytes": "2000000"}
    odd |= {"text_memory_bytes": "200000000", "constraint_cache_bytes": "1000"}
    odd |= {"image_memory_bytes": "200000000", "max_image_bytes": "2000"}
    odd |= {"access_log_ratio": "0.5", "compact_json": "false"}
    odd |= {"memory_fraction": "0.5", "otlp_sample_ratio": "0.5", "otlp_endpoint": "http://c:4317"}
    odd |= {
        "max_message_bytes": "2048",
        "uds_path": str(tmp_path / "s"),
        "port": "11",
        "tgis_port": "10",
    }
    odd |= {"metrics_port": "16", "metrics_names": "vllm,tgi", "loopback_port": "9"}
    odd |= {"num_nodes": "13", "master_port": "14", "shard_port": "15"}
    odd |= {"max_input_tokens": "17", "max_total_tokens": "18", "max_batch_total_tokens": "19"}
    odd |= {"max_batch_prefill_tokens": "19", "max_queue_tokens": "20"}
    odd |= {"admission": "optimistic", "batching": "alternate", "queue_order": "shortest"}
    odd |= {"preemption": "swap", "task": "embed"}
    # Not with an odd type of the cache.
    odd |= {"deterministic": "false"}
    given = {name: odd.get(name, "12") for name in ServerSettings.model_fields}
    for name, value in given.items():
        monkeypatch.setenv(variable(name), value)
    settings, plain = load_settings(), ServerSettings.model_fields
    same = [n for n in plain if getattr(settings, n) == plain[n].default]
    assert same == ["deterministic"]


def test_an_empty_variable_counts_as_not_set(monkeypatch):
    monkeypatch.setenv("TOKENPOD_UDS_PATH", "")
    monkeypatch.setenv("TOKENPOD_PORT", "")
    assert (load_settings().uds_path, load_settings().port) == (None, 50051)


def test_the_url_that_kubernetes_puts_under_our_name_is_ignored(monkeypatch):
    monkeypatch.setenv("TOKENPOD_PORT", "tcp://10.0.0.7:50051")
    monkeypatch.setenv("TOKENPOD_PORT_50051_TCP_ADDR", "10.0.0.7")
    monkeypatch.setenv("TOKENPOD_SERVICE_HOST", "10.0.0.7")
    assert load_settings().port == 50051
    assert unknown_variables() == []


def test_a_misspelt_variable_is_noticed(monkeypatch):
    monkeypatch.setenv("TOKENPOD_MAX_BEST_OFF", "3")
    monkeypatch.setenv("TOKENPOD_TOKEN", "secret")
    assert unknown_variables() == ["TOKENPOD_MAX_BEST_OFF"]


def test_settings_can_not_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        load_settings().port = 1


def test_a_fault_names_the_flag_or_the_variable_its_value_and_the_limit(monkeypatch):
    assert fault(max_best_of=0).startswith("--max-best-of is 0: it should be greater than")
    monkeypatch.setenv("TOKENPOD_PORT", "70000")
    assert fault().startswith("TOKENPOD_PORT is 70000: it should be less than or equal to 65535")


def test_every_fault_is_told_on_a_line_of_its_own():
    lines = fault(max_best_of=0, dtype="int3", otlp_endpoint="collector").splitlines()
    assert [line.split()[0] for line in lines] == ["--dtype", "--max-best-of", "--otlp-endpoint"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            {"max_input_tokens": 9, "max_total_tokens": 9},
            "--max-input-tokens is 9: it must be less",
        ),
        ({"max_total_tokens": 9, "max_batch_total_tokens": 8}, "--max-total-tokens is 9"),
        (
            {"max_input_tokens": 8, "max_batch_total_tokens": 8},
            "less than --max-batch-total-tokens",
        ),
        (
            {"max_batch_prefill_tokens": 9, "max_batch_total_tokens": 8},
            "--max-batch-prefill-tokens",
        ),
        (
            {"preemption": "swap", "host_kv_bytes": 9},
            "--preemption is swap: it needs --admission optimistic or past_future, not exact",
        ),
        (
            {"preemption": "vllm", "admission": "past_future"},
            "--preemption is vllm: it needs --host-kv-bytes",
        ),
        ({"host_kv_bytes": -1}, "--host-kv-bytes is -1: it should be greater than or equal to 0"),
        ({"waiting_served_ratio": 1.2}, "--waiting-served-ratio is 1.2: it needs --batching alt"),
        (
            {"max_waiting_tokens": 20, "batching": "mixed"},
            "--max-waiting-tokens is 20: it needs --batching alternate",
        ),
        (
            {"waiting_served_ratio": -0.1, "batching": "alternate"},
            "--waiting-served-ratio is -0.1: it should be greater than or equal to 0",
        ),
        (
            {"batching": "alternate", "max_input_tokens": 9, "max_batch_prefill_tokens": 8},
            "--max-input-tokens is 9: with --batching alternate it must be at most"
            " --max-batch-prefill-tokens, which is 8",
        ),
        ({"max_input_tokens": 9, "max_queue_tokens": 8}, "at most --max-queue-tokens, which is 8"),
        ({"max_front_end_bytes": 2**20}, "at most --max-front-end-bytes, which is 1048576"),
        (
            {"kv_cache_dtype": "fp8_e4m3", "device": "cpu"},
            "--kv-cache-dtype is fp8_e4m3: it needs a GPU",
        ),
        (
            {"kv_cache_dtype": "int8", "device": "cuda"},
            "--kv-cache-dtype is int8: it is for CPUs",
        ),
        ({"config_override": "[1"}, "--config-override is [1: it is not JSON"),
        ({"config_override": "[1]"}, "--config-override is [1]: it must be a JSON object"),
        ({"port": 7, "health_port": 7}, "--port and --health-port are both 7"),
        ({"port": 7, "metrics_port": 7}, "--port and --metrics-port are both 7"),
        ({"metrics_names": "vllm"}, "--metrics-names is vllm: --metrics-port is needed with it"),
        ({"metrics_port": 7, "metrics_names": "vllm,x"}, "--metrics-names has 'x': there are vllm"),
        ({"health_port": 7, "tgis_port": 7}, "--health-port and --tgis-port are both 7"),
        (
            {"deterministic": True, "device": "cuda", "kv_cache_dtype": "fp8_e4m3"},
            "--kv-cache-dtype is fp8_e4m3: with --deterministic it must be auto",
        ),
        ({"uds_path": "/tmp/" + "x" * 101}, "--uds-path has 106 bytes: at most 101"),
        ({"uds_path": "/no/such/socket"}, "there is no folder /no/such"),
        ({"tls_cert": __file__}, "--tls-key is needed with it"),
        ({"tls_key": __file__}, "--tls-cert is needed with it"),
        ({"tls_client_ca": __file__}, "--tls-cert is needed with it"),
        ({"loopback_port": 7}, "--loopback-port is 7: --tls-cert is needed with it"),
        ({"loopback_port": 7, "port": 7}, "--port and --loopback-port are both 7"),
        ({"tls_cert": "/no/cert", "tls_key": __file__}, "--tls-cert is /no/cert: there is no such"),
        ({"auth_token_file": "/dev/null"}, "there is no such file"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(flags, expected):
    assert expected in fault(**flags)


def test_settings_at_the_edge_of_each_rule_are_fine(tmp_path):
    load_settings(max_input_tokens=8, max_total_tokens=9, max_batch_total_tokens=9)
    load_settings(max_batch_prefill_tokens=9, max_batch_total_tokens=9)
    load_settings(port=0, health_port=0)
    load_settings(admission="optimistic", preemption="recompute")
    load_settings(admission="optimistic", preemption="swap", host_kv_bytes=1)
    load_settings(batching="alternate", max_input_tokens=8, max_batch_prefill_tokens=8)
    load_settings(batching="alternate", waiting_served_ratio=0, max_waiting_tokens=0)


def test_an_empty_token_file_is_refused(tmp_path):
    (tmp_path / "tokens").touch()
    assert "the file is empty" in fault(auth_token_file=tmp_path / "tokens")


def test_what_is_derived_fits_what_is_given(monkeypatch):
    on_cpu = load_settings(device="cpu", max_batch_total_tokens=100)
    assert (on_cpu.resolved_prefill_tokens, on_cpu.resolved_batch_size) == (100, 64)
    assert on_cpu.resolved_dtype == "float32"
    on_gpu = load_settings(device="cuda")
    assert (on_gpu.resolved_prefill_tokens, on_gpu.resolved_batch_size) == (4096, 1024)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    assert (on_cpu.resolved_image_workers, on_gpu.resolved_image_workers) == (2, 5)
    assert load_settings(device="cuda", image_workers=1).resolved_image_workers == 1
    assert on_gpu.resolved_dtype is None
    assert load_settings(device="cuda", dtype="float16").resolved_dtype == "float16"


def test_a_gpus_engine_may_choose_fewer_rows_and_what_may_wait_follows():
    s = load_settings(device="cuda")
    assert s.fewer_rows
    assert (s.resolved_concurrent_requests, s.requests_taken(192)) == (4096, 768)
    assert load_settings(device="cuda", max_concurrent_requests=7).requests_taken(192) == 7
    assert not load_settings(device="cuda", max_batch_size=1024).fewer_rows
    assert not load_settings(device="cpu").fewer_rows
    # Messages of so many calls would be more than front ends should hold by default.
    assert s.resolved_front_end_bytes == 8 * 1024**3


def test_steps_have_a_bound_unless_it_is_0_or_prompts_are_computed_whole():
    given = [{"device": "cuda"}, {"device": "cpu"}, {"max_gap_ms": 7.5}, {"max_gap_ms": 0}]
    assert [load_settings(**each).max_gap_seconds for each in given] == [0.12, 0.1, 0.0075, None]
    assert load_settings(batching="alternate", max_gap_ms=50).max_gap_seconds is None


def test_a_cpus_engine_may_take_smaller_steps_unless_somebody_has_chosen():
    assert load_settings(device="cpu").short_prompt_steps
    assert not load_settings(device="cuda").short_prompt_steps
    assert not load_settings(device="cpu", max_batch_prefill_tokens=512).short_prompt_steps
    # Prompts that no step divides must fit into one.
    assert not load_settings(device="cpu", batching="alternate").short_prompt_steps


def test_one_front_end_is_enough_for_a_cpu_and_a_gpu_may_have_up_to_four():
    assert load_settings(device="cpu").resolved_front_ends == 1
    assert load_settings(device="cpu", front_ends=3).resolved_front_ends == 3
    assert 1 <= load_settings(device="cuda").resolved_front_ends <= 4
    assert load_settings(device="cuda", front_ends=6).resolved_front_ends == 6
    assert "front-ends" in fault(front_ends=-1)


def test_an_ipv6_address_is_bracketed():
    settings = load_settings(hostname="::", port=5, health_port=0)
    assert (settings.address, settings.health_address) == ("[::]:5", None)


def test_every_setting_says_what_it_means_and_where_it_belongs():
    for name, field in ServerSettings.model_fields.items():
        assert descriptions()[name].endswith("."), name
        assert group_of(field) in list(Group), name


@pytest.mark.pod
def test_the_documentation_is_current_and_has_every_setting():
    check = [sys.executable, "-P", "tools/settings_docs.py", "--check"]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "settings.md").read_text()
    assert all(
        f"| `{flag(name)}` | `{variable(name)}` |" in page for name in ServerSettings.model_fields
    )


def test_a_launchers_variables_alone_place_a_rank(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "pod-0")
    monkeypatch.setenv("MASTER_PORT", "1234")
    s = load_settings()
    assert (s.world, s.first_rank, s.leads) == (4, 3, False)
    assert (s.master_addr, s.master_port) == ("pod-0", 1234)


def test_a_place_of_our_own_wins_over_a_launchers(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    s = load_settings(num_shard=2)
    assert (s.world, s.first_rank, s.leads) == (2, 0, True)
    monkeypatch.setenv("TOKENPOD_NUM_SHARD", "8")
    assert load_settings().world == 8


def test_a_launchers_variable_that_is_wrong_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert fault().startswith("WORLD_SIZE is many: ")


def test_a_pods_ranks_follow_those_of_the_pods_before():
    s = load_settings(num_nodes=3, num_shard=4, node_rank=2, master_addr="pod-0")
    assert (s.world, s.first_rank, s.leads) == (12, 8, False)


def test_a_followers_socket_has_its_ranks_number(tmp_path):
    uds = {"uds_path": str(tmp_path / "s")}
    assert load_settings(**uds).socket_path == f"{tmp_path}/s-0"
    place = {"num_nodes": 2, "num_shard": 4, "node_rank": 1, "master_addr": "pod-0"}
    assert load_settings(**uds, **place).socket_path == f"{tmp_path}/s-4"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"node_rank": 1}, "--node-rank is 1: it must be less than --num-nodes, which is 1"),
        ({"num_nodes": 2}, "--num-nodes is 2: --master-addr is needed with it"),
        (
            {"num_nodes": 2, "master_addr": "a", "shard_port": 50051},
            "--shard-port and --port are both 50051: they must differ",
        ),
    ],
)
def test_a_place_that_cannot_be_is_refused(flags, said):
    assert fault(**flags) == said


def test_certificates_between_pods_go_together(tmp_path):
    pem = tmp_path / "pem"
    pem.write_text("x")
    said = fault(shard_tls_cert=str(pem))
    assert said.endswith("--shard-tls-key and --shard-tls-ca is needed with it")
