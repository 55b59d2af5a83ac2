"""`tokenpod batch`: every prompt of a file is answered, in its order."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from support.pods.harness import ServerProcess
from tokenpod_client import Client
from tokenpod_client.cli.app import main
from tokenpod_client.cli.batch import Progress, read_lines
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2 import GenerateOnceResponse
from tokenpod_client.requests import generate_request


def answered(
    server: ServerProcess, folder: Path, lines: list[Any], *more: str
) -> tuple[int, list[Any]]:
    """The exit status, and the answers."""
    prompts, answers = folder / "prompts.jsonl", folder / "answers.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--address", server.address, *more]
    status = main(["batch", str(prompts), str(answers), *flags])
    return status, [json.loads(line) for line in answers.read_text().splitlines()]


def test_answers_are_those_of_single_calls_in_the_files_order(server, tmp_path, capsys):
    lines: list[Any] = [
        # The first takes longest, and its answer comes first.
        {"prompt": "def main():\n", "max_new_tokens": 40, "id": "a"},
        {"prompt": "import ", "id": 7},
        {"token_ids": [5, 17, 301], "stopping": {"max_new_tokens": 3}},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt": "x = ", "constraint": {"regex": "[0-9]{4}"}},
        *({"prompt": f"a{i} = "} for i in range(20)),
    ]
    flags = ("--max-new-tokens", "5", "--concurrency", "2")
    status, found = answered(server, tmp_path, lines, *flags)
    assert status == 0
    assert [each["index"] for each in found] == [*range(25)]
    assert [each.get("id") for each in found[:3]] == ["a", 7, None]
    texts = [each["results"][0]["text"] for each in found]
    with Client(server.address) as client:
        assert texts[0] == client.generate("def main():\n", max_new_tokens=40).text()
        assert texts[1] == client.generate("import ", max_new_tokens=5).text()
        assert texts[2] == client.generate([5, 17, 301], max_new_tokens=3).text()
        chat = [{"role": "user", "content": "hi"}]
        assert texts[3] == client.generate(chat, max_new_tokens=5).text()
    assert texts[4].isdigit()
    assert capsys.readouterr().err.startswith("[25 of 25 prompts, 0 failed; ")


def test_a_prompt_that_is_refused_fails_alone(server, tmp_path, capsys):
    lines = [{"prompt": "a"}, {"prompt": "b", "top_p": 7}, {"prompt": "c", "adapter": "none"}]
    status, found = answered(server, tmp_path, lines, "--max-new-tokens", "2")
    assert status == 1
    assert found[0]["results"]
    assert found[1] == {
        "index": 1,
        "error": {
            "code": "INVALID_ARGUMENT",
            "message": "request.sampling.top_p is 7; must be from 0 to 1",
        },
    }
    assert found[2]["error"]["code"] == "NOT_FOUND"
    assert "3 of 3 prompts, 2 failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: Expecting property name"),
        ("[]", "line 2: is no JSON object"),
        ("{}", "line 2: has 0 of prompt, token_ids, messages; it must have one"),
        ('{"prompt": "a", "messages": []}', "line 2: has 2 of prompt, token_ids, messages"),
        ('{"prompt": 7}', "line 2: prompt is '7'"),
        ('{"prompt": "a", "tokens": 7}', "GenerateRequest has no field tokens"),
        ('{"prompt": "a", "top_k": "many"}', "line 2: "),
    ],
)
def test_a_line_that_can_not_be_sent_is_named_before_any_is(tmp_path, capsys, line, problem):
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text(f'{{"prompt": "a"}}\n{line}\n')
    assert main(["batch", str(prompts), str(answers), "--address", "127.0.0.1:1"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {prompts}, line 2: ")
    assert problem in said
    assert said.count("\n") == 1
    assert not answers.exists()


def test_a_line_has_options_in_openais_forms(tmp_path):
    """They count before those of the command, by whichever name."""
    line = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 7}
    line |= {"response_format": {"type": "json_object"}, "stop": "."}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(line))
    (found,) = read_lines(tmp_path / "prompts.jsonl", {"max_new_tokens": 3, "seed": 5})
    request = generate_request(found.prompt, **found.options)
    assert request.stopping == pb.StoppingOptions(max_new_tokens=7, stop_sequences=["."])
    assert request.constraint == pb.Constraint(json_object={})
    assert request.sampling.seed == 5


def test_answers_that_are_there_are_not_written_over(server, tmp_path, capsys):
    (tmp_path / "answers.jsonl").write_text("[1]\n")
    assert answered(server, tmp_path, [{"prompt": "a"}]) == (1, [[1]])
    assert "answers.jsonl: File exists" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_how_far_it_has_come():
    notes = Terminal()
    progress = Progress(2, notes)
    usage = pb.Usage(prompt_token_count=30, generated_token_count=12)
    progress.note(GenerateOnceResponse(usage=usage))
    assert "1 of 2 prompts, 0 failed; 30 tokens in, 12 out: " in notes.getvalue()
    progress.note(None)
    progress.close()
    assert notes.getvalue().rpartition("\r\x1b[K")[2].startswith("[2 of 2 prompts, 1 failed; ")
