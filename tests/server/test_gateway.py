"""The Shepherd Model Gateway, as it comes from PyPI, before two pods: OpenAI's API.

SMG_VENV names a virtual environment with the packages smg and openai, which are no dependencies of
this project; without it these tests are skipped.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints.embedding_models import EmbeddingGolden, save_tokenizer
from support.clients.public_api import PROMPT, generate, said
from support.outside import gateway_client
from support.pods.harness import ServerProcess, free_port, serve
from support.texts import fixed_text
from support.texts.chat_templates import QWEN
from support.waiting import wait_for
from tokenpod_client import Client
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service

VENV = Path(os.environ.get("SMG_VENV", "/nowhere"))
pytestmark = pytest.mark.skipif(
    "SMG_VENV" not in os.environ, reason="SMG_VENV names no environment with smg and openai"
)
#: What the gateway's answers say about who served them.
WORKER = "x-smg-routed-worker-id"


@dataclass(frozen=True)
class Gateway:
    port: int
    pods: tuple[ServerProcess, ServerProcess]

    def complete(self, prompt: str, **fields: Any) -> tuple[int, str, Any]:
        """Status, worker and answer of one completion."""
        with contextlib.closing(self.connection()) as connection:
            self.send(connection, prompt, **fields)
            answer = connection.getresponse()
            return answer.status, answer.getheader(WORKER) or "", json.loads(answer.read() or "{}")

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)

    @staticmethod
    def send(connection: http.client.HTTPConnection, prompt: str, **fields: Any) -> None:
        body = {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0} | fields
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)

    def serves(self) -> bool:
        try:
            return self.complete(PROMPT)[0] == 200
        except OSError:
            return False


@contextlib.contextmanager
def launched(pods: Sequence[ServerProcess], log: Path, *flags: str) -> Iterator[int]:
    """The gateway before these pods; its port."""
    port, metrics = free_port(), free_port()
    command = [str(VENV / "bin" / "smg"), "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), *flags]
    command += ["--policy", "cache_aware", "--worker-urls"]
    command += [f"grpc://{pod.address}" for pod in pods]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    log = tmp_path_factory.mktemp("gateway") / "log"
    with contextlib.ExitStack() as stack:
        one, other = (stack.enter_context(serve("--kv-cache-events", wait=False)) for _ in range(2))
        for pod in (one, other):
            pod.wait_until_serving()
        found = Gateway(stack.enter_context(launched((one, other), log)), (one, other))
        wait_for(found.serves, 120)
        wait_for(lambda: log.read_text().count("Tokenizer 'demo'") > 0, 120)
        yield found


def by_openais_client(port: int, what: str) -> Any:
    """What gateway_client.py tells."""
    command = [str(VENV / "bin" / "python"), gateway_client.__file__]
    command += [f"http://127.0.0.1:{port}", what]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=300)
    return json.loads(done.stdout)


def test_openais_client_gets_what_our_own_gets(gateway: Gateway) -> None:
    told = by_openais_client(gateway.port, "texts")
    stub = gateway.pods[0].stub()
    stopping = {"max_new_tokens": 12}
    asked = service.TokenizeRequest(text=PROMPT, add_special_tokens=False, return_token_ids=True)
    tokens = stub.Tokenize(asked)
    plain = pb.GenerateRequest(token_ids={"ids": tokens.token_ids}, stopping=stopping)
    assert told["text"] == told["streamed"] == generate(stub, plain).samples[0].text
    assert told["usage"] == [tokens.token_count, 12]
    chat = pb.GenerateRequest(
        chat=said(*((turn["role"], turn["content"]) for turn in gateway_client.CHAT)),
        stopping=stopping,
        output={"return_logprobs": True},
    )
    expected = generate(stub, chat).samples[0]
    assert told["said"] == told["said_streamed"] == expected.text
    assert told["logprobs"] == pytest.approx(expected.logprobs, abs=1e-3)
    assert told["stopped"][1] == "stop"
    assert told["stopped"][0] == told["text"].partition("(")[0]
    assert re.match(r'\{\s*"a"', told["constraint"]), "the schema reached the engine"
    assert told["models"] == ["demo"]


def test_a_call_that_the_model_writes_is_a_call_for_openais_client(tmp_path: Path) -> None:
    """The gateway parses by its own flags. Tokens cut the call anywhere."""
    said = "Let me| look.|\n<tool|_call>\n{'na|me': 'lo|ok', 'argum|ents': {'q'|: 'ab'}|}\n</tool_|"
    pieces = [*said.replace("'", '"').split("|")[:-1], "call>"]
    model = fixed_text.save(tmp_path / "speaker", pieces, QWEN)
    log = tmp_path / "log"
    with (
        serve("--model-id", str(model), "--served-model-name=speaker", "--kv-cache-events") as pod,
        launched((pod,), log, "--tool-call-parser", "qwen") as port,
    ):
        wait_for(lambda: "registered tokenizer 'speaker'" in log.read_text(), 120)
        told = by_openais_client(port, "tools")
    call = [("look", {"q": "ab"})]
    for choice in ("auto", "None"):
        text, calls = told[choice]
        assert (text.strip(), _parsed(calls)) == ("Let me look.", call)
        text, calls, finish = told[f"{choice} streamed"]
        assert (_parsed(calls), finish) == (call, "tool_calls")
        # The gateway drops text that comes in one message with the beginning of a call.
        assert "Let me look.".startswith(text.strip())
    assert told["none"] == ["".join(pieces), []]
    assert told["none streamed"] == ["".join(pieces), [], "stop"]
    finish, prompt = told["turn"]
    assert finish == "tool_calls", "a call and its result go back as history"
    assert prompt > told["prompt"]


def _parsed(calls: list[list[str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


def test_a_text_becomes_a_vector(tmp_path: Path) -> None:
    golden = EmbeddingGolden("minilm", tmp_path / "model")
    save_tokenizer(golden.folder, "encoder")
    log = tmp_path / "log"
    flags = ("--model-id", str(golden.folder), "--served-model-name", "vectors")
    with serve(*flags) as pod, launched((pod,), log) as port:
        wait_for(lambda: "registered tokenizer 'vectors'" in log.read_text(), 120)

        def embedded(given: Any) -> Any:
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
                body = json.dumps({"model": "vectors", "input": given})
                headers = {"content-type": "application/json"}
                connection.request("POST", "/v1/embeddings", body, headers)
                answer = connection.getresponse()
                return answer.status, json.loads(answer.read())

        status, told = embedded("abc")
        assert status == 200
        assert told["usage"]["prompt_tokens"] == 5
        with Client(pod.address) as client:
            (expected,) = client.embed(["abc"])
        assert told["data"][0]["embedding"] == pytest.approx(list(expected), abs=1e-6)
        # As docs/openai.md says: several texts become one.
        assert len(embedded(["abc", "de"])[1]["data"]) == 1


def test_prompts_go_where_their_beginning_is_cached(gateway: Gateway) -> None:
    """The gateway knows it by the pods' own word: it routes by whole blocks."""
    begins = [f"# {name}\n" + f"value_{name} = {name!r}\n" * 20 for name in "abcdef"]
    first = [gateway.complete(begin) for begin in begins]
    for begin, (_, worker, _) in zip(begins, first, strict=True):
        status, again, answer = gateway.complete(begin + "def f():\n")
        assert (status, again) == (200, worker)
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0.8 * usage["prompt_tokens"]


def test_a_client_that_leaves_ends_its_call(gateway: Gateway) -> None:
    """The gateway aborts it by its name, and does not cancel the stream."""

    def generated() -> list[int]:
        """How many tokens each call had when it ended."""
        logs = "".join(pod.log.read_text() for pod in gateway.pods)
        return [int(found) for found in re.findall(r"output_tokens=(\d+)", logs)]

    before = len(generated())
    with contextlib.closing(gateway.connection()) as connection:
        gateway.send(connection, PROMPT, max_tokens=1900, stream=True, ignore_eos=True)
        assert connection.getresponse().readline()
    wait_for(lambda: len(generated()) == before + 1)
    assert max(generated()) < 1900


def test_a_pod_that_is_killed_under_load_costs_what_it_ran(gateway: Gateway) -> None:
    """It is the last test here: one of two pods is gone."""
    outcomes: list[tuple[int, str]] = []
    stop = threading.Event()

    def work(number: int) -> None:
        while not stop.is_set():
            status, worker, _ = gateway.complete(f"# {number}\nimport os\n")
            outcomes.append((status, worker))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len({worker for _, worker in outcomes}) == 2)
    gateway.pods[0].process.kill()
    before = len(outcomes)
    wait_for(lambda: len(outcomes) >= before + 60, 300)
    stop.set()
    for thread in threads:
        thread.join()
    failed = [outcome for outcome in outcomes if outcome[0] != 200]
    assert len(failed) <= 2 * len(threads), failed
    assert {status for status, _ in outcomes[-20:]} == {200}
    assert len({worker for _, worker in outcomes[-20:]}) == 1
    assert gateway.pods[1].process.poll() is None
