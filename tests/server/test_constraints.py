"""Constraints over a real socket: `tokenpod.v1`, TGIS, a router's batches, vLLM's protocol."""

from __future__ import annotations

import json
import re
from typing import Any

import grpc
import jsonschema
import pytest

from router.client import ShardClient
from router.conformance.fixtures import ask as shard_ask
from router.conformance.fixtures import batch_of, finish, tell
from router.records import FinishReason, GrammarType, Sampling
from router.wire import V3
from support.clients.public_api import ask, finished_of, once, refused, stream, violations
from support.pods.harness import ServerProcess
from tokenpod_client.protos.fmaas import generation_pb2 as fmaas
from tokenpod_client.protos.fmaas.generation_pb2_grpc import GenerationServiceStub as TgisStub
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

INVALID = grpc.StatusCode.INVALID_ARGUMENT
#: Every token is about as likely as a model of random weights makes it.
RANDOM = {"do_sample": True, "temperature": 50.0}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def api(server: ServerProcess) -> Any:
    return GenerationServiceStub(server.channel())


def constrained(api: Any, constraint: dict[str, Any], *, new: int = 120, **more: Any) -> Any:
    fields = {"constraint": constraint, "stopping": {"max_new_tokens": new}, **more}
    (finished,) = finished_of(stream(api, ask(**fields)))
    return finished


#: A constraint, and whether a text conforms to it, by others than the server.
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "schema": (
        {"json_schema": json.dumps(SCHEMA)},
        lambda text: jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(text)),
    ),
    "regex": ({"regex": r"[A-Z]{2}-\d{3}"}, lambda text: re.fullmatch(r"[A-Z]{2}-\d{3}", text)),
    "grammar": (
        {"grammar": 'start: "x" DIGIT+\nDIGIT: /[0-9]/'},
        lambda t: re.fullmatch("x[0-9]+", t),
    ),
    "GBNF": ({"grammar": 'root ::= "x" [0-9]{1,3}'}, lambda t: re.fullmatch("x[0-9]{1,3}", t)),
    "choice": ({"choice": {"texts": ["red", "green"]}}, lambda text: text in ("red", "green")),
    "tags": (
        {
            "structural_tag": json.dumps(
                {
                    "type": "structural_tag",
                    "format": {
                        "type": "tag",
                        "begin": "<n>",
                        "content": {"type": "regex", "pattern": "[0-9]{2}"},
                        "end": "</n>",
                    },
                }
            )
        },
        lambda text: re.fullmatch("<n>[0-9]{2}</n>", text),
    ),
}


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", CASES)
def test_the_text_conforms(api: Any, kind: str, sampled: bool) -> None:
    constraint, check = CASES[kind]
    sampling = RANDOM | {"seed": 3} if sampled else {}
    finished = constrained(api, constraint, sampling=sampling, new=300)
    if finished.finish_reason == pb.FINISH_REASON_EOS_TOKEN:
        assert finished.constraint_satisfied
        assert check(finished.text), finished.text
    else:
        assert kind == "grammar", finished  # unbounded


def test_several_samples_with_a_seed_are_the_same_again(api: Any) -> None:
    fields = {
        "constraint": {"json_schema": json.dumps(SCHEMA)},
        "sampling": {"n": 2, "temperature": 5.0, "seed": 11},
        "stopping": {"max_new_tokens": 200},
    }
    first, again = (
        {f.sample_index: f.text for f in finished_of(stream(api, ask(**fields)))} for _ in range(2)
    )
    assert first == again
    assert first[0] != first[1]
    for text in first.values():
        jsonschema.validate(json.loads(text), SCHEMA)


def test_any_object_is_one(api: Any) -> None:
    finished = constrained(api, {"json_object": {}}, new=60)
    assert finished.text.startswith("{")
    assert finished.HasField("constraint_satisfied")


def test_an_end_within_the_text_does_not_conform(api: Any) -> None:
    finished = constrained(api, {"regex": "[ab]{50}"}, new=5)
    assert finished.finish_reason == pb.FINISH_REASON_LENGTH
    assert finished.HasField("constraint_satisfied")
    assert not finished.constraint_satisfied


def test_a_stop_sequence_that_cuts_the_text_says_nothing_of_it(api: Any) -> None:
    """Where it stands no text has ended, and each has it."""
    stopping = {"max_new_tokens": 30, "stop_sequences": ["3"]}
    request = ask(constraint={"regex": "[12]{4}3[12]{20}"}, stopping=stopping)
    (finished,) = finished_of(stream(api, request))
    assert finished.finish_reason == pb.FINISH_REASON_STOP_SEQUENCE
    assert re.fullmatch("[12]{4}", finished.text)
    assert not finished.HasField("constraint_satisfied")


def test_once_has_the_same(api: Any) -> None:
    answer = once(api, ask(constraint={"regex": "[0-9]{4}"}, stopping={"max_new_tokens": 20}))
    (finished,) = answer.results
    assert re.fullmatch("[0-9]{4}", finished.text)
    assert finished.constraint_satisfied


ROW = [f'r{i}: r{i + 1} "x"?' for i in range(3000)]
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "look-around": ({"regex": "a(?=b)"}, "constraint.regex", "look-ahead"),
    "back reference": ({"regex": r"(a)\1"}, "constraint.regex", "back references"),
    "borders": ({"regex": r"\bfoo"}, "constraint.regex", "at character 0"),
    "not a regex": ({"regex": "("}, "constraint.regex", "unclosed group"),
    "no JSON": ({"json_schema": "{"}, "constraint.json_schema", "no JSON text"),
    "keyword": (
        {"json_schema": '{"properties": {"a": {"frobnicate": 1}}}'},
        "constraint.json_schema",
        "#/properties/a/frobnicate",
    ),
    "not": ({"json_schema": '{"not": {}}'}, "constraint.json_schema", "'not'"),
    "remote": (
        {"json_schema": '{"$ref": "http://127.0.0.1:1/x"}'},
        "constraint.json_schema",
        "only references within the schema",
    ),
    "contradiction": (
        {"json_schema": '{"type": "integer", "minimum": 5, "maximum": 3}'},
        "constraint.json_schema",
        "minimum (5)",
    ),
    "recursion": (
        {"json_schema": '{"type": "array", "items": {"$ref": "#"}, "minItems": 1}'},
        "constraint.json_schema",
        "each needs another one within, at #/items/$ref",
    ),
    # It would let the library's stack overflow.
    "a long row": (
        {"grammar": "\n".join(["start: r0", *ROW, 'r3000: "y"'])},
        "constraint.grammar",
        "name each other in too long a row",
    ),
    "levels": ({"json_schema": '{"a":' * 5000}, "constraint.json_schema", "#"),
    "grammar": ({"grammar": "start: nothing"}, "constraint.grammar", "nothing"),
    "no texts": ({"choice": {}}, "constraint.choice.texts", "empty"),
    "an empty text": ({"choice": {"texts": ["a", ""]}}, "constraint.choice.texts[1]", "empty"),
    "no kind": ({}, "constraint", "no kind"),
    "a megabyte": ({"grammar": "x" * 2**20}, "constraint.grammar", "--max-constraint-bytes"),
    "tags": ({"structural_tag": "{}"}, "constraint.structural_tag", "structures"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_served_is_refused_by_name_and_place(api: Any, kind: str) -> None:
    constraint, field, problem = REFUSED[kind]
    request = ask(stopping={"max_new_tokens": 8})
    request.constraint.SetInParent()
    request.constraint.MergeFrom(pb.Constraint(**constraint))
    error = refused(INVALID, lambda: stream(api, request))
    found = violations(error)
    assert field in found, found
    assert problem in found[field]


def test_ignoring_ends_contradicts_a_constraint(api: Any) -> None:
    request = ask(constraint={"regex": "a"}, stopping={"ignore_eos": True})
    error = refused(INVALID, lambda: stream(api, request))
    assert "stopping.ignore_eos" in violations(error)


def test_get_model_names_constraints(api: Any) -> None:
    features = api.GetModel(service.GetModelRequest()).model.features
    assert {"constraint.json_schema", "constraint.structural_tag"} <= {*features}


# -- other protocols ---------------------------------------------------------------------------

TGIS: dict[str, tuple[dict[str, Any], str]] = {
    "json_schema": ({"json_schema": json.dumps({"enum": [12, 345]})}, "12|345"),
    "regex": ({"regex": "[xy]{4}"}, "[xy]{4}"),
    "choice": ({"choice": {"choices": ["red", "green"]}}, "red|green"),
    "grammar": ({"grammar": 'root ::= "a" "b"?'}, "ab?"),
    "format": ({"format": "JSON"}, r"\{(.|\n)*"),
}


@pytest.mark.parametrize("kind", TGIS)
def test_tgis_clients_guide_a_text(server: ServerProcess, kind: str) -> None:
    guided, wanted = TGIS[kind]
    stub = TgisStub(server.channel())
    params = {"decoding": guided, "stopping": {"max_new_tokens": 30}}
    request = fmaas.BatchedGenerationRequest(requests=[{"text": "x = "}], params=params)
    (answer,) = stub.Generate(request, timeout=120).responses
    assert re.fullmatch(wanted, answer.text)
    if kind != "format":
        assert answer.stop_reason == fmaas.EOS_TOKEN


def test_tgis_clients_are_told_what_is_wrong_with_a_guide(server: ServerProcess) -> None:
    stub = TgisStub(server.channel())
    request = fmaas.SingleGenerationRequest(
        request={"text": "x"}, params={"decoding": {"regex": "a(?!b)"}}
    )
    error = refused(INVALID, lambda: list(stub.GenerateStream(request, timeout=120)))
    assert "look-ahead" in violations(error)["params.decoding.regex"]


VLLM: dict[str, tuple[dict[str, Any], str]] = {
    "json_schema": ({"json_schema": '{"enum": [12, 345]}'}, "12|345"),
    "regex": ({"regex": "[xy]{4}"}, "[xy]{4}"),
    "choice": ({"choice": {"choices": ["red", "green"]}}, "red|green"),
    "grammar": ({"grammar": 'start: "a" "b"?'}, "ab?"),
    "json_object": ({"json_object": True}, r"\{(.|\n)*"),
    "structural_tag": (
        {
            "structural_tag": json.dumps(
                {
                    "type": "structural_tag",
                    "format": {
                        "type": "tag",
                        "begin": "<n>",
                        "content": {"type": "regex", "pattern": "[0-9]{2}"},
                        "end": "</n>",
                    },
                }
            )
        },
        "<n>[0-9]{2}</n>",
    ),
}


@pytest.mark.parametrize("kind", VLLM)
def test_gateways_constrain_a_text(server: ServerProcess, kind: str) -> None:
    smg = pytest.importorskip("smg_grpc_proto")
    pb2, rpc = smg.vllm_engine_pb2, smg.vllm_engine_pb2_grpc
    constraint, wanted = VLLM[kind]
    request = pb2.GenerateRequest(
        text="x = ", sampling_params={"temperature": 0.0, "max_tokens": 30, **constraint}
    )
    (answer,) = rpc.VllmEngineStub(server.channel()).Generate(request, timeout=120)
    api = GenerationServiceStub(server.channel())
    ids = [token for token in answer.complete.output_ids if token != 1]
    text = api.Detokenize(service.DetokenizeRequest(token_ids=ids), timeout=120).text
    assert re.fullmatch(wanted, text)


ROUTED: dict[str, tuple[GrammarType, str, str]] = {
    # What router 3.3.7 sends: regular expressions, also of schemas, by outlines-core.
    "regex": (GrammarType.REGEX, "[xy]{4}", "[xy]{4}"),
    "a schema's regex": (
        GrammarType.REGEX,
        r'\{[ ]?"a"[ ]?:[ ]?(0|[1-9][0-9]{0,2})[ ]?,[ ]?"b"[ ]?:[ ]?(true|false)[ ]?\}',
        r'\{ ?"a" ?: ?\d{1,3} ?, ?"b" ?: ?(true|false) ?\}',
    ),
    "a schema": (GrammarType.JSON, '{"enum": ["q", 17]}', '"q"|17'),
}


@pytest.mark.parametrize("kind", ROUTED)
async def test_a_routers_requests_conform_and_others_of_the_batch_go_on(
    server: ServerProcess, kind: str
) -> None:
    grammar_type, grammar, wanted = ROUTED[kind]
    shard = ShardClient(server.uds, V3())
    try:
        await shard.clear_cache()
        alone = await tell(shard, shard_ask(0, max_new_tokens=12))
        sampling = Sampling(grammar=grammar, grammar_type=grammar_type)
        one = shard_ask(1, "x = ", max_new_tokens=60, sampling=sampling, ignore_eos_token=False)
        bad = shard_ask(2, "x = ", sampling=Sampling(grammar="(", grammar_type=GrammarType.REGEX))
        reply = await shard.prefill(batch_of(1, one, shard_ask(0, max_new_tokens=12), bad))
        stories = await finish(shard, reply)
        assert re.fullmatch(wanted, stories[1].end.text)
        assert stories[1].end.finish_reason == FinishReason.EOS_TOKEN
        assert stories[0].ids == alone.ids
        assert (stories[2].end.text, stories[2].end.finish_reason) == ("", FinishReason.EOS_TOKEN)
    finally:
        await shard.clear_cache()
        await shard.close()


@pytest.mark.parametrize(("grammar", "ignored"), [("(", False), ("ab", True)])
async def test_the_batchs_only_constrained_request_ends_alone(
    server: ServerProcess, grammar: str, ignored: bool
) -> None:
    """Its end and the answer to the step that it ends in leave the engine together."""
    shard = ShardClient(server.uds, V3())
    try:
        await shard.clear_cache()
        alone = await tell(shard, shard_ask(0, max_new_tokens=6))
        sampling = Sampling(grammar=grammar, grammar_type=GrammarType.REGEX)
        for batch in range(1, 11):
            one = shard_ask(1, "x = ", sampling=sampling, ignore_eos_token=ignored)
            others = shard_ask(0, max_new_tokens=6), shard_ask(2, max_new_tokens=6)
            reply = await shard.prefill(batch_of(batch, one, *others))
            stories = await finish(shard, reply)
            assert stories[0].ids == stories[2].ids == alone.ids
            assert stories[1].end.text == ("ab" if ignored else "")
    finally:
        await shard.clear_cache()
        await shard.close()
