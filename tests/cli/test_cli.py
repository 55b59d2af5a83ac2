"""The command line, as real processes against a small real server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

import tokenpod
from support.pods import prefork
from tokenpod.commands import foreign
from tokenpod.service.config.rules import flag
from tokenpod.service.config.sources import ServerSettings, variable
from tokenpod_client.cli import commands
from tokenpod_client.cli.app import app, main
from tokenpod_client.cli.request import RequestOptions
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.protos.tokenpod.v1 import model_pb2
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import (
    GenerationServiceServicer,
    add_GenerationServiceServicer_to_server,
)

pytestmark = pytest.mark.pod

SECONDS = 60


@dataclass
class Done:
    """What a command left behind."""

    status: int
    out: str
    err: str


@dataclass
class Canned(GenerationServiceServicer):
    """Answers by the prompt; keeps what it was asked."""

    address: str = ""
    requests: list = field(default_factory=list)
    metadata: list = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def Generate(self, request, context):
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if request.text == "refuse":
            await context.abort_with_status(rpc_status.to_status(bad_request()))
        if request.text == "full":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue\nis full")
        yield pb.GenerateResponse(started=pb.Started(request_id="r1", prompt_token_count=3))
        samples = max(request.sampling.n, 1)
        # Interleaved, as a step brings them.
        for text in ("Hé", "llo"):
            for index in range(samples):
                yield pb.GenerateResponse(tokens=pb.Tokens(sample_index=index, text=text))
        if request.text == "slow":
            await self._until_cancelled()
        for index in range(samples):
            yield pb.GenerateResponse(finished=finished(index))
        yield pb.GenerateResponse(completed=pb.Completed(usage=USAGE))

    async def GenerateOnce(self, request, context):
        self.requests.append(request.request)
        samples = max(request.request.sampling.n, 1)
        results = [finished(index) for index in range(samples)]
        return service.GenerateOnceResponse(
            started=pb.Started(request_id="r1"), results=results, usage=USAGE
        )

    async def _until_cancelled(self):
        try:
            await asyncio.sleep(SECONDS)
        finally:
            self.cancelled.set()

    async def GetModel(self, request, context):
        limits = model_pb2.Limits(max_input_tokens=2047, max_total_tokens=2048)
        model = model_pb2.Model(
            name="demo",
            dtype="float32",
            limits=limits,
            eos_token_ids=[1, 2],
            features=["text"],
            task=model_pb2.TASK_CLASSIFY,
            embedding=model_pb2.EmbeddingFacts(dimensions=2, labels=["good", "bad"]),
        )
        return service.GetModelResponse(model=model)

    async def Tokenize(self, request, context):
        self.requests.append(request)
        ids = [7, 8, 9] if request.return_token_ids else []
        return service.TokenizeResponse(token_count=3, token_ids=ids)


USAGE = pb.Usage(prompt_token_count=3, generated_token_count=2)


def finished(index: int) -> pb.Finished:
    return pb.Finished(
        sample_index=index,
        text="Héllo",
        finish_reason=pb.FINISH_REASON_STOP_SEQUENCE,
        stop_sequence="\n\n",
        generated_token_count=2,
    )


def bad_request() -> status_pb2.Status:
    bad = error_details_pb2.BadRequest()
    bad.field_violations.add(field="sampling.top_p", description="is 7; it must be at most 1")
    bad.field_violations.add(field="truncate", description="is 9; it must be at most 8")
    packed = Packed()
    packed.Pack(bad)
    return status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message="two", details=[packed])


@pytest.fixture
async def server() -> AsyncIterator[Canned]:
    canned = Canned()
    aio = grpc.aio.server()
    add_GenerationServiceServicer_to_server(canned, aio)
    board = health.aio.HealthServicer()
    await board.set("readiness", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(board, aio)
    canned.address = f"127.0.0.1:{aio.add_insecure_port('127.0.0.1:0')}"
    await aio.start()
    yield canned
    await aio.stop(0)


@asynccontextmanager
async def start(*arguments: str, **variables: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A running command, which does not outlive a failed test."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "tokenpod", *arguments),
        **{"stdin": pipe, "stdout": pipe, "stderr": pipe, "env": environment(variables)},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def environment(variables: dict[str, str]) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TOKENPOD_")}
    return clean | {"COLUMNS": "200", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"} | variables


async def tokenpod_(*arguments: str, stdin: str = "", **variables: str) -> Done:
    """A command from its start to its end."""
    done = await asyncio.to_thread(
        prefork.run, arguments, stdin=stdin, env=environment(variables), timeout=SECONDS
    )
    assert "Traceback" not in done.stderr
    return Done(done.returncode, done.stdout, done.stderr)


async def test_generate_prints_the_text_and_closes_with_a_line_of_figures(server):
    done = await tokenpod_("generate", "hi", "--address", server.address)
    assert (done.status, done.out) == (0, "Héllo\n")
    assert done.err.startswith("[2 tokens; ")
    assert "first token after" in done.err
    assert done.err.endswith("stop sequence '\\n\\n']\n")


async def test_generate_sends_every_option_in_its_field(server):
    options = [
        "--do-sample",
        "--temperature",
        "0",
        "--top-k",
        "1",
        "--top-p",
        "0.5",
        "--min-p",
        "0.25",
        "--typical-p",
        "0.75",
        "--n",
        "2",
        "--repetition-penalty",
        "1.5",
        "--presence-penalty",
        "-1",
        "--frequency-penalty",
        "2",
        "--best-of",
        "3",
        "--logit-bias",
        "5=-1.5",
        "--logit-bias",
        "6=2",
        "--seed",
        "0",
        "--watermark",
        "--max-new-tokens",
        "0",
        "--min-new-tokens",
        "1",
        "--stop-sequence",
        "a",
        "--stop-sequence",
        "b",
        "--stop-token-id",
        "4",
        "--ignore-eos",
        "--include-stop-sequence",
        "--time-limit",
        "1.5",
        "--no-stream",
        "--logprobs",
        "--top-n-tokens",
        "2",
        "--prompt-logprobs",
        "--truncate",
        "7",
        "--request-id",
        "x",
        "--priority",
        "-3",
        "--model",
        "demo",
        "--adapter",
        "law",
        "--max-draft-tokens",
        "0",
    ]
    done = await tokenpod_("generate", "hi", "--address", server.address, *options)
    assert done.status == 0, done.err
    assert server.requests == [
        pb.GenerateRequest(
            text="hi",
            sampling=pb.SamplingOptions(
                do_sample=True,
                temperature=0,
                top_k=1,
                top_p=0.5,
                min_p=0.25,
                typical_p=0.75,
                repetition_penalty=1.5,
                presence_penalty=-1,
                frequency_penalty=2,
                logit_bias={5: -1.5, 6: 2},
                seed=0,
                watermark=True,
                n=2,
                best_of=3,
            ),
            stopping=pb.StoppingOptions(
                max_new_tokens=0,
                min_new_tokens=1,
                stop_sequences=["a", "b"],
                stop_token_ids=[4],
                ignore_eos=True,
                include_stop_sequence=True,
                time_limit={"seconds": 1, "nanos": 500_000_000},
            ),
            output=pb.OutputOptions(
                return_logprobs=True, top_n_tokens=2, return_prompt_logprobs=True
            ),
            truncate=7,
            request_id="x",
            priority=-3,
            model="demo",
            adapter="law",
            max_draft_tokens=0,
        )
    ]


async def test_a_constraint_is_a_text_or_a_file(server, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    for options, constraint in (
        (["--json-schema", f"@{schema}"], pb.Constraint(json_schema='{"type": "object"}')),
        (["--json-object"], pb.Constraint(json_object={})),
        (["--choice", "yes", "--choice", "no"], pb.Constraint(choice={"texts": ["yes", "no"]})),
    ):
        await tokenpod_("generate", "hi", "--address", server.address, *options)
        assert server.requests[-1].constraint == constraint
    given = {"regex": "a+", "grammar": "start: /a/", "structural_tag": "{}"}
    for name, text in given.items():
        options = RequestOptions(**{name: text})
        made = commands.generate_request("hi", options.fields, chat=False, system=None)
        assert made.constraint == pb.Constraint(**{name: text})


async def test_n_of_a_search_is_its_own(server):
    options = ("--beam-width", "4", "--length-penalty", "0.5", "--n", "2")
    await tokenpod_("generate", "hi", "--address", server.address, *options)
    beam = pb.BeamSearch(width=4, length_penalty=0.5, n=2)
    assert server.requests[0].sampling == pb.SamplingOptions(beam=beam)


async def test_options_that_are_not_given_stay_unset(server):
    await tokenpod_("generate", "hi", "--address", server.address)
    sent = server.requests[0]
    assert sent.sampling == pb.SamplingOptions()
    assert sent.stopping == pb.StoppingOptions()
    assert not sent.sampling.HasField("temperature")
    assert not sent.stopping.HasField("max_new_tokens")
    assert sent == pb.GenerateRequest(
        text="hi", sampling=sent.sampling, stopping=sent.stopping, output=sent.output
    )


async def test_an_answer_as_a_whole_is_printed_like_a_stream(server):
    arguments = ("--no-stream", "--n", "2", "--address", server.address)
    done = await tokenpod_("generate", "hi", *arguments)
    assert done.out == "--- sample 0 ---\nHéllo\n--- sample 1 ---\nHéllo\n"
    assert done.err.startswith("[4 tokens; stop sequence")
    as_json = await tokenpod_("generate", "hi", "--json", *arguments)
    told = json.loads(as_json.out)
    assert [result["text"] for result in told["results"]] == ["Héllo", "Héllo"]


async def test_interleaved_samples_are_printed_one_after_the_other(server):
    done = await tokenpod_("generate", "hi", "--n", "2", "--address", server.address)
    assert done.out == "--- sample 0 ---\nHéllo\n--- sample 1 ---\nHéllo\n"


async def test_json_has_one_line_an_event(server):
    done = await tokenpod_("generate", "hi", "--json", "--address", server.address)
    events = [json.loads(line) for line in done.out.splitlines()]
    assert [next(iter(event)) for event in events] == [
        *("started", "tokens", "tokens", "finished", "completed")
    ]
    assert events[1]["tokens"]["sample_index"] == 0
    assert events[3]["finished"]["finish_reason"] == "FINISH_REASON_STOP_SEQUENCE"
    assert done.err == ""


async def test_a_chat_comes_from_standard_input_with_a_token(server):
    arguments = ("generate", "-", "--chat", "--system", "be brief", "--address", server.address)
    done = await tokenpod_(*arguments, stdin="hé", TOKENPOD_TOKEN="s3cret")
    assert done.status == 0, done.err
    roles = [(m.role, m.content[0].text) for m in server.requests[0].chat.messages]
    assert roles == [("system", "be brief"), ("user", "hé")]
    assert server.metadata[0]["authorization"] == "Bearer s3cret"


async def test_each_field_that_the_server_complains_of_is_a_line(server):
    done = await tokenpod_("generate", "refuse", "--address", server.address)
    assert done.status == 1
    assert done.err.splitlines() == [
        "error: sampling.top_p is 7; it must be at most 1",
        "error: truncate is 9; it must be at most 8",
    ]


async def test_another_status_is_one_line_with_its_code(server):
    done = await tokenpod_("generate", "full", "--address", server.address)
    assert (done.status, done.err) == (1, "error: RESOURCE_EXHAUSTED: the queue is full\n")


async def test_a_deadline_ends_the_call(server):
    done = await tokenpod_("generate", "slow", "--deadline", "1", "--address", server.address)
    assert done.status == 1
    assert done.err.startswith("error: DEADLINE_EXCEEDED: ")


async def test_ctrl_c_cancels_the_call(server):
    async with start("generate", "slow", "--address", server.address) as process:
        assert (await process.stdout.readexactly(6)).decode() == "Héllo"
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), SECONDS)
    await asyncio.wait_for(server.cancelled.wait(), SECONDS)
    assert (process.returncode, err) == (130, b"")


async def test_a_reader_that_has_enough_is_no_error_message(server):
    async with start("generate", "hi", "--json", "--address", server.address) as process:
        # As `| head -0` does: the only reader of the pipe goes away.
        process._transport.get_pipe_transport(1).close()
        err = await asyncio.wait_for(process.stderr.read(), SECONDS)
        assert (await process.wait(), err) == (1, b"")


@pytest.fixture
def key_and_cert(tmp_path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", *make, *names, *files], check=True, capture_output=True)
    return key, cert


async def test_tls_trusts_the_authority_that_is_given_and_no_other(key_and_cert):
    key, cert = key_and_cert
    aio = grpc.aio.server()
    add_GenerationServiceServicer_to_server(Canned(), aio)
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    address = f"127.0.0.1:{aio.add_secure_port('127.0.0.1:0', credentials)}"
    await aio.start()
    trusted = await tokenpod_("tokens", "abc", "--tls-ca", str(cert), "--address", address)
    distrusted = await tokenpod_("tokens", "abc", "--tls", "--address", address)
    await aio.stop(0)
    assert (trusted.status, trusted.out) == (0, "3\n"), trusted.err
    assert distrusted.status == 1
    assert distrusted.err.startswith(f"error: can't reach {address}: ")
    assert distrusted.err.count("\n") == 1


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:1", "Connection refused"),
        ("unix:/no/such/socket", "No such file or directory"),
    ],
)
async def test_an_unreachable_server_is_one_line(address, reason):
    done = await tokenpod_("info", "--address", address)
    assert (done.status, done.err) == (1, f"error: can't reach {address}: {reason}\n")


async def test_health_exits_0_only_when_serving(server):
    serving = await tokenpod_("health", "--address", server.address)
    assert (serving.status, serving.out) == (0, "SERVING\n")
    not_ready = await tokenpod_("health", "--service", "readiness", "--address", server.address)
    assert (not_ready.status, not_ready.out) == (1, "NOT_SERVING\n")
    unknown = await tokenpod_("health", "--service", "nonsense", "--address", server.address)
    assert (unknown.status, unknown.out) == (1, "")
    said = "error: --service is 'nonsense': the server tells the health of no such service\n"
    assert unknown.err == said


async def test_health_watch_prints_until_interrupted(server):
    arguments = ("health", "--watch", "--service", "readiness", "--address", server.address)
    async with start(*arguments) as process:
        assert await process.stdout.readline() == b"NOT_SERVING\n"
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), SECONDS) == 130


async def test_info_is_a_table_or_json(server):
    text = await tokenpod_("info", "--address", server.address)
    rows = [" ".join(line.split()) for line in text.out.splitlines()]
    assert rows[0] == "name demo"
    assert {"dtype float32", "max total tokens 2048", "eos token ids 1, 2"} <= {*rows}
    assert {"task classify", "dimensions 2", "labels good, bad"} <= {*rows}
    as_json = await tokenpod_("info", "--json", "--address", server.address)
    told = json.loads(as_json.out)
    assert (told["name"], told["limits"]["max_input_tokens"]) == ("demo", 2047)
    assert told["features"] == ["text"]


async def test_tokens_counts_and_names_them(server):
    arguments = ("tokens", "abc", "--ids", "--no-special", "--address", server.address)
    done = await tokenpod_(*arguments)
    assert (done.status, done.out) == (0, "3\n7 8 9\n")
    expected = service.TokenizeRequest(text="abc", return_token_ids=True, add_special_tokens=False)
    assert server.requests == [expected]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("nonsense", "error: No such command 'nonsense'."),
        ("serve --nonsense", "error: No such option '--nonsense'"),
        (
            "serve --tensor-parallel-size 2",
            "error: No such option: --tensor-parallel-size. It is a",
        ),
        (
            "serve --max_model_len=5",
            "error: No such option: --max_model_len. It is a flag of vLLM;",
        ),
        ("serve one --model-id two", "error: MODEL is one: --model-id says two"),
        ("serve --port x", "error: Invalid value for '--port'"),
        ("serve --max-best-of 0", "error: --max-best-of is 0: it should be greater"),
        ("serve --port 7 --health-port 7", "error: --port and --health-port are both 7"),
        ("generate", "error: Missing argument"),
        ("generate hi --address nowhere", "error: Invalid value for --address: is 'nowhere'"),
        ("generate hi --logit-bias 3", "error: Invalid value for --logit-bias: is '3'"),
        ("generate hi --top-k -1", "error: Invalid value for '--top-k'"),
        ("generate hi --system x", "error: Invalid value for --system: needs --chat"),
        (
            "generate hi --regex a --json-object",
            "error: Invalid value for --regex: and --json-object exclude each other",
        ),
        (
            "generate hi --grammar @/no/file",
            "error: Invalid value for --grammar: is @/no/file: No such file or directory",
        ),
        ("tokens hi --tls-ca /no/file", "error: Invalid value for '--tls-ca'"),
    ],
)
async def test_wrong_usage_is_one_line_and_exit_status_2(arguments, expected):
    done = await tokenpod_(*arguments.split())
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(expected)
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "ours"),
    [
        ("--tensor-parallel-size 2", "vLLM; here it is --num-shard"),
        ("--max-model-len 4096", "vLLM; here it is --max-total-tokens"),
        ("--max-num-seqs 4", "vLLM; here it is --max-batch-size"),
        ("--trust-remote-code", "vLLM; here it is nothing: no code of a model's"),
        ("--max-input-length 4", "TGI; here it is --max-input-tokens"),
        ("--api-key x", "vLLM and TGI; here it is --auth-token-file"),
    ],
)
async def test_flags_of_other_servers_are_told_by_our_name(capsys, arguments, ours):
    assert main(["serve", *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert f"It is a flag of {ours}" in said
    named = re.findall(r"--[a-z-]+", said.partition("here it is")[2])
    assert set(named) <= {flag(name) for name in ServerSettings.model_fields}


def test_every_name_that_a_foreign_flag_gets_is_ours():
    known = {flag(name) for name in ServerSettings.model_fields}
    known |= {f"--no-{name[2:]}" for name in known}
    for table in (foreign._VLLM, foreign._TGI):
        assert not table.keys() & known - {"--model"}
        assert all(set(re.findall(r"--[a-z-]+", ours)) <= known for ours in table.values())
    settings = {variable(name) for name in ServerSettings.model_fields}
    assert {f"TOKENPOD_{name}" for name in foreign._VARIABLES} <= settings


@pytest.mark.parametrize("command", ["serve", "size"])
def test_a_flag_that_was_removed_is_refused_with_what_to_use_instead(capsys, command):
    assert main([command, "--draft-tree", "31"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: No such option: --draft-tree. It was removed: drafts of a")
    assert "--speculate" in said
    assert said.count("\n") == 1


async def test_tgis_variable_for_the_model_does_not_start_the_demo():
    done = await tokenpod_("serve", MODEL_ID="org/name")
    said = "error: MODEL_ID is org/name, which is TGI's variable; here it is TOKENPOD_MODEL_ID\n"
    assert (done.status, done.err) == (2, said)


def test_the_help_of_every_command_fits_80_columns_and_begins_with_its_summary(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in app.list_commands():
        assert main([name, "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80, name
        summary = app.entries[name].summary
        assert app.get_command(None, name).help.startswith(summary.partition(";")[0].rstrip("."))


async def test_a_variable_names_the_server(server):
    done = await tokenpod_("tokens", "abc", TOKENPOD_ADDRESS=server.address)
    assert (done.status, done.out) == (0, "3\n"), done.err


async def test_a_missing_model_fails_the_start():
    done = await tokenpod_("serve", "/no/such/model")
    assert done.status == 1
    assert "error: --model-id is /no/such/model: there is no such folder\n" in done.err


async def test_help_of_serve_lists_every_setting():
    done = await tokenpod_("serve", "--help")
    assert done.status == 0
    absent = [n for n in ServerSettings.model_fields if flag(n) not in done.out]
    assert absent == []
    assert all(variable(name) in done.out for name in ServerSettings.model_fields)
    assert all(f"\n{group}:\n" in done.out for group in ("Model", "Network", "Security"))


async def test_the_version_is_the_packages():
    done = await tokenpod_("--version")
    assert (done.status, done.out) == (0, f"tokenpod {tokenpod.__version__}\n")


async def test_help_imports_nothing_heavy():
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-X", "importtime", "-m", "tokenpod", "--help"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await process.communicate()
    imported = {line.rpartition("|")[2].strip() for line in err.decode().splitlines()}
    assert "click" in imported
    assert not imported & {"torch", "transformers", "grpc", "google.protobuf", "pydantic"}
