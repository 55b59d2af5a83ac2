"""Pods whose models read texts: vectors, scores and labels over gRPC."""

from __future__ import annotations

import asyncio
import json
import math
import queue
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from support.checkpoints.embedding_models import EmbeddingGolden, save_tokenizer
from support.clients import wirefuzz
from support.clients.public_api import violations
from support.pods.harness import ServerProcess, serve
from tokenpod.core.task import VectorFacts
from tokenpod.models.convert.pickles import convert_words
from tokenpod.models.folder import read_config
from tokenpod.models.pooling.files import _word_weights
from tokenpod.service.calls.embedding import AskedText, ReadCall, ReadLimits, pairs_of
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.dialects.tei.codec import encoded
from tokenpod.service.text.encoder import Tokenised
from tokenpod.service.text.tokenizers.tokenizer import Tokenizer
from tokenpod_client import AsyncClient, Client, ServerError
from tokenpod_client.embeddings import embed_request
from tokenpod_client.protos.tei.v1 import tei_pb2 as tei_pb
from tokenpod_client.protos.tei.v1 import tei_pb2_grpc as tei_grpc
from tokenpod_client.protos.tokenpod.v1 import embedding_service_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import model_pb2
from tokenpod_client.protos.tokenpod.v1.embedding_service_pb2_grpc import EmbeddingServiceStub

TEXTS = ["abc", "no", "a long text of many more letters", "xyz" * 9]
CLS, SEP = 2, 3


def ids(text: str) -> list[int]:
    """What the tokenizer makes of a text without special tokens; "yes" and "no" are words."""
    found, at = [], 0
    while at < len(text):
        word = next((w for w in ("yes", "no") if text.startswith(w, at)), text[at])
        found.append({"yes": 4, "no": 5}.get(word, ord(word[0]) - 33 + 6 if word != " " else 1))
        at += len(word)
    return found


def framed(text: str) -> list[int]:
    return [CLS, *ids(text), SEP]


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: Any) -> EmbeddingGolden:
    golden = EmbeddingGolden("minilm", tmp_path_factory.mktemp("minilm"))
    save_tokenizer(golden.folder, "encoder")
    prompts = {"prompts": {"query": "q:", "document": ""}, "default_prompt_name": None}
    write(golden.folder / "config_sentence_transformers.json", prompts)
    write(golden.folder / "sentence_bert_config.json", {"max_seq_length": 48})
    return golden


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def pod(minilm: EmbeddingGolden) -> Iterator[ServerProcess]:
    with serve("--model-id", str(minilm.folder), "--max-client-batch-size", "32") as running:
        yield running
        assert running.stop() == 0


def close(found: Any, expected: torch.Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(torch.tensor(list(found)), expected, **tolerance or CLOSE)


CLOSE = {"rtol": 2e-4, "atol": 2e-5}


def test_vectors_are_those_of_the_modules(pod: ServerProcess, minilm: EmbeddingGolden) -> None:
    with Client(pod.address) as client:
        found = client.embed(TEXTS)
        assert len(found) == len(TEXTS)
        for text, vector in zip(TEXTS, found, strict=True):
            close(vector, minilm.vector(framed(text)))
        (prompted,) = client.embed(["abc"], prompt_name="query")
        close(prompted, minilm.vector(framed("q:abc")))
        (of_ids,) = client.embed([[CLS, 9, SEP]])
        close(of_ids, minilm.vector([CLS, 9, SEP]))
        each = client.embed_tokens(["abc", "x"])
        assert [len(vectors) for vectors in each] == [5, 3]

    async def read() -> Any:
        client = AsyncClient(pod.address)
        try:
            return await client.embed(["abc"])
        finally:
            await client.close()

    close(asyncio.run(read())[0], minilm.vector(framed("abc")))


def test_numbers_travel_in_fewer_bits(pod: ServerProcess, minilm: EmbeddingGolden) -> None:
    expected = minilm.vector(framed("abc"))
    with Client(pod.address) as client:
        (halves,) = client.embed(["abc"], format="bfloat16")
        assert list(halves) == expected.bfloat16().float().tolist() or torch.allclose(
            torch.tensor(list(halves)), expected, rtol=2**-8, atol=0
        )
        (bytes_,) = client.embed(["abc"], format="int8")
        close(bytes_, expected, rtol=0, atol=float(expected.abs().max()) / 254 + 1e-6)


def test_dimensions_are_cut_before_the_length(pod: ServerProcess, minilm: EmbeddingGolden) -> None:
    expected = minilm.vector(framed("abc"))[:8]
    with Client(pod.address) as client:
        (cut,) = client.embed(["abc"], dimensions=8)
        close(cut, torch.nn.functional.normalize(expected, dim=0))
        (plain,) = client.embed(["abc"], dimensions=8, normalize=False)
        close(plain, expected)


def test_long_texts_are_refused_or_cut(pod: ServerProcess, minilm: EmbeddingGolden) -> None:
    text = "".join(chr(97 + i % 13) for i in range(3000))
    with Client(pod.address) as client:
        with pytest.raises(ServerError, match=r"inputs\[1\].text has 3002 tokens.*at most 48"):
            client.embed(["a", text])
        (end,) = client.embed([text], truncation="end")
        close(end, minilm.vector(framed(text[:46])))
        (start,) = client.embed([text], truncation="start")
        close(start, minilm.vector(framed(text[-46:])))
        # In a worker process, too.
        (end,) = client.embed([text * 3], truncation="end")
        close(end, minilm.vector(framed(text[:46])))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "inputs"),
        ({"inputs": [pb.TextInput()]}, "inputs[0].input"),
        ({"inputs": [pb.TextInput(text="")]}, "inputs[0].text"),
        ({"inputs": [pb.TextInput(tokens=pb.TextTokens(ids=[101]))]}, "inputs[0].tokens"),
        ({"inputs": [pb.TextInput(text="a")] * 33}, "inputs"),
        ({"inputs": [pb.TextInput(text="a")], "dimensions": 33}, "dimensions"),
        ({"inputs": [pb.TextInput(text="a")], "dimensions": 0}, "dimensions"),
        ({"inputs": [pb.TextInput(text="a")], "prompt_name": "none"}, "prompt_name"),
        ({"inputs": [pb.TextInput(text="a")], "truncation": 3}, "truncation"),
        ({"inputs": [pb.TextInput(text="a")], "priority": 101}, "priority"),
    ],
)
def test_what_is_wrong_is_named(pod: ServerProcess, fields: Any, field: str) -> None:
    stub: Any = EmbeddingServiceStub(pod.channel())
    with pytest.raises(grpc.RpcError) as refused:
        stub.Embed(pb.EmbedRequest(**fields), timeout=30)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert set(violations(refused.value)) == {field}


@pytest.mark.parametrize("rpc", wirefuzz.embedding_rpcs(), ids=str)
def test_each_field_at_its_extremes(pod: ServerProcess, rpc: wirefuzz.Rpc) -> None:
    channel = pod.channel()
    codes = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    for case in wirefuzz.cases(rpc):
        error = None
        try:
            rpc.send(channel, case.data)
        except grpc.RpcError as failure:
            error = failure
        assert error is None or error.code() in codes, f"{case}: {error}"
        if error is not None and error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            (field,) = violations(error)
            blamed, own = re.sub(r"\[\d+\]", "", field), case.path
            assert blamed.startswith(own) or own.startswith(blamed), f"{case}: {field}"
    pod.wait_until_idle()


@pytest.mark.parametrize("rpc", wirefuzz.embedding_rpcs(), ids=str)
def test_what_is_no_message_is_refused(pod: ServerProcess, rpc: wirefuzz.Rpc) -> None:
    def refused(data: bytes) -> dict[str, str]:
        with pytest.raises(grpc.RpcError) as caught:
            rpc.send(pod.channel(), data)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        return violations(caught.value)

    for garbage in wirefuzz.GARBAGE.values():
        assert len(refused(garbage)) == 1
    for path in wirefuzz.string_fields(rpc.method.input_type):
        ((field, problem),) = refused(wirefuzz.raw(path, b"ok \xff\xfe")).items()
        assert re.sub(r"\[\d+\]", "", field) == ".".join(each.name for each in path)
        assert "is not valid UTF-8" in problem


def test_another_rpc_is_refused_with_the_right_one(pod: ServerProcess) -> None:
    with Client(pod.address) as client:
        for call in (
            lambda: client.generate_once("a", max_new_tokens=1),
            lambda: client.score("a", ["b"]),
            lambda: client.classify(["a"]),
        ):
            with pytest.raises(ServerError, match=r"made to embed: call .*/Embed") as refused:
                call()
            assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
        assert client.tokenize("ab") == framed("ab")


def test_info_says_what_the_model_is_for(pod: ServerProcess) -> None:
    with Client(pod.address) as client:
        model = client.model()
        assert not model.features, "fields of Generate, which is refused"
    assert model.task == model_pb2.TASK_EMBED
    facts = model.embedding
    assert (facts.dimensions, facts.pooling, facts.normalized) == (32, "mean", True)
    assert (facts.max_tokens, facts.max_texts) == (48, 32)
    assert dict(facts.prompts) == {"query": "q:", "document": ""}


def test_calls_leave_a_line_in_the_log(pod: ServerProcess) -> None:
    with Client(pod.address) as client:
        client.embed(["abc", "de"], request_id="of-two")
    (line,) = pod.logged("request_id=of-two")
    assert "rpc=tokenpod.v1.EmbeddingService/Embed" in line
    assert "texts=2 prompt_tokens=9" in line


def tei(address: str) -> Any:
    """Stubs of TEI's services by their names."""
    channel = grpc.insecure_channel(address)
    return types.SimpleNamespace(
        **{
            name: getattr(tei_grpc, f"{name}Stub")(channel)
            for name in ("Info", "Embed", "Predict", "Rerank", "Tokenize")
        }
    )


def test_clients_of_tei_get_vectors(pod: ServerProcess, minilm: EmbeddingGolden) -> None:
    stubs = tei(pod.address)
    info = stubs.Info.Info(tei_pb.InfoRequest(), timeout=30)
    assert info.model_type == tei_pb.MODEL_TYPE_EMBEDDING
    assert (info.max_input_length, info.max_client_batch_size) == (48, 32)
    request = tei_pb.EmbedRequest(inputs="abc", normalize=True)
    one = stubs.Embed.Embed(request, timeout=30)
    close(one.embeddings, minilm.vector(framed("abc")))
    assert (one.metadata.compute_chars, one.metadata.compute_tokens) == (3, 5)
    assert one.metadata.total_time_ns >= one.metadata.inference_time_ns > 0
    everything = stubs.Embed.EmbedAll(tei_pb.EmbedAllRequest(inputs="abc"), timeout=30)
    assert len(everything.token_embeddings) == 5
    texts = [f"text {i}" for i in range(100)]
    requests = (tei_pb.EmbedRequest(inputs=text) for text in texts)
    for text, each in zip(texts, stubs.Embed.EmbedStream(requests, timeout=60), strict=True):
        close(each.embeddings, minilm.vector(framed(text)))
    tokens = stubs.Tokenize.Tokenize(
        tei_pb.EncodeRequest(inputs="ab", add_special_tokens=True), timeout=30
    ).tokens
    assert [token.id for token in tokens] == framed("ab")
    assert [token.special for token in tokens] == [True, False, False, True]
    ids_asked = tei_pb.DecodeRequest(ids=framed("ab"), skip_special_tokens=True)
    assert stubs.Tokenize.Decode(ids_asked, timeout=30).text.replace(" ", "") == "ab"


def test_a_stream_answers_before_the_next_request(pod: ServerProcess) -> None:
    """Clients that ask, and wait, and ask again would hang otherwise."""
    asked: queue.Queue[Any] = queue.Queue()
    stream = tei(pod.address).Embed.EmbedStream(iter(asked.get, None), timeout=60)
    for text in TEXTS:
        asked.put(tei_pb.EmbedRequest(inputs=text))
        assert len(next(stream).embeddings) == 32
    asked.put(tei_pb.EmbedRequest(inputs=""))
    with pytest.raises(grpc.RpcError) as refused:
        next(stream)
    assert set(violations(refused.value)) == {"inputs"}
    asked.put(None)


async def test_a_long_list_of_tokens_lets_others_have_their_turn(minilm: EmbeddingGolden) -> None:
    tokenizer = Tokenizer.load(minilm.folder)
    turns, count = 0, 30_000

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.ensure_future(others())
    tokens = Tokenised(count, [9] * count, list(range(2 * count)))
    listed = (await encoded(tokens, tokenizer)).tokens
    assert (len(listed), listed[-1].stop) == (count, 2 * count - 1)
    assert turns >= 25
    with pytest.raises(InvalidArgument, match="bytes as they are listed; at most 3932160 fit"):
        await encoded(Tokenised(10 * count, 10 * tokens.ids, 10 * tokens.offsets), tokenizer)
    beside.cancel()


def test_what_tei_can_ask_and_is_not_there_is_named(pod: ServerProcess) -> None:
    stubs = tei(pod.address)
    with pytest.raises(grpc.RpcError, match=r"call tei\.v1\.Embed/Embed") as refused:
        stubs.Embed.EmbedSparse(tei_pb.EmbedSparseRequest(inputs="a"), timeout=30)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    for call in (
        lambda: stubs.Rerank.Rerank(tei_pb.RerankRequest(query="a", texts=["b"]), timeout=30),
        lambda: next(stubs.Predict.PredictStream(iter([tei_pb.PredictRequest(inputs="a")]))),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "tokenpod.v1.EmbeddingService/Embed" in str(refused.value.details())
    long = tei_pb.EmbedRequest(inputs="x" * 60)
    with pytest.raises(grpc.RpcError, match="set `truncate` to leave some out"):
        stubs.Embed.Embed(long, timeout=30)
    long.truncate = True
    assert len(stubs.Embed.Embed(long, timeout=30).embeddings) == 32


def test_sparse_vectors_are_their_numbers_that_are_not_zero(tmp_path: Path) -> None:
    golden = EmbeddingGolden("splade", tmp_path)
    save_tokenizer(golden.folder, "encoder")
    # A stream of many texts has one place, and waits for what its own texts hold.
    limits = ("--max-concurrent-requests", "2", "--max-queue-tokens", "40")
    with (
        serve("--model-id", str(golden.folder), *limits) as running,
        Client(running.address) as client,
    ):
        stub = tei(running.address).Embed
        expected = {text: golden.vector(framed(text)) for text in TEXTS}
        texts = 20 * TEXTS
        requests = (tei_pb.EmbedSparseRequest(inputs=text) for text in texts)
        for text, found in zip(texts, stub.EmbedSparseStream(requests, timeout=60), strict=True):
            there = [each.index for each in found.sparse_embeddings]
            assert 0 < len(there) < len(expected[text])
            assert there == expected[text].nonzero().flatten().tolist()
            close([each.value for each in found.sparse_embeddings], expected[text][there])
        assert client.model().embedding.pooling == "splade"
        close(client.embed(TEXTS[:1])[0], expected[TEXTS[0]])
        (sparse,) = client.embed_sparse(TEXTS[:1])
        assert [*sparse] == expected[TEXTS[0]].nonzero().flatten().tolist()
        assert running.stop() == 0


def test_words_are_weighed_beside_the_vector_of_a_text(tmp_path: Path) -> None:
    """BGE-M3: relu(linear(state)) of each token, of equal tokens the highest, of special ones none;
    the published file is a pickle, which is converted first.
    """
    golden = EmbeddingGolden("bge-m3", tmp_path / "made")
    save_tokenizer(golden.folder, "encoder")
    linear = torch.nn.Linear(32, 1)
    torch.save(linear.state_dict(), tmp_path / "sparse_linear.pt")
    assert convert_words(tmp_path, golden.folder) == ["sparse_linear.safetensors"]
    # A space is token 1, which this model takes for padding.
    texts = [text.replace(" ", "") for text in (*TEXTS, "aaabca")]
    expected = []
    for text in texts:
        tokens, weights = framed(text), linear(golden.states(framed(text))).relu()[:, 0].tolist()
        found: dict[int, float] = {}
        for token, weight in zip(tokens[1:-1], weights[1:-1], strict=True):
            if weight > 0:
                found[token] = max(weight, found.get(token, 0.0))
        expected.append(dict(sorted(found.items())))
    assert any(expected)
    with serve("--model-id", str(golden.folder)) as running, Client(running.address) as client:
        assert client.model().embedding.sparse
        for found, own in zip(client.embed_sparse(texts), expected, strict=True):
            assert [*found] == [*own]
            close(found.values(), torch.tensor([*own.values()]))
        stub = tei(running.address).Embed
        answer = stub.EmbedSparse(tei_pb.EmbedSparseRequest(inputs=texts[-1]), timeout=30)
        told = {each.index: each.value for each in answer.sparse_embeddings}
        assert [*told] == [*expected[-1]]
        close(told.values(), torch.tensor([*expected[-1].values()]))
        request = embed_request(texts[:1], {})
        request.sparse_vectors = request.token_vectors = True
        both = client._call(client._embedding.Embed, request, None).embeddings[0]
        assert both.vector_count == len(framed(texts[0]))
        assert [*both.sparse_indices] == [*expected[0]]
        close(client.embed(texts[:1])[0], golden.vector(framed(texts[0])))
        assert running.stop() == 0


def test_a_head_of_words_that_is_a_pickle_is_named(tmp_path: Path) -> None:
    golden = EmbeddingGolden("bge-m3", tmp_path)
    spec = read_config(golden.folder)
    assert _word_weights(golden.folder, spec) == (None, "")
    (golden.folder / "sparse_linear.pt").write_bytes(b"never read")
    words, problem = _word_weights(golden.folder, spec)
    assert words is None
    limits = ReadLimits(VectorFacts(32, 32, sparse_problem=problem), 101, 64, 8, 64)
    wanted = ReadCall([AskedText("inputs", "a")], sparse=True)
    with pytest.raises(InvalidArgument, match=r"sparse_linear\.safetensors is missing.*convert"):
        limits.check(wanted, "inputs")
    # Before there is a text for each.
    with pytest.raises(InvalidArgument, match="has 9 entries; this server allows 8"):
        pairs_of(limits, "", 9 * ["x"], "documents")


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: Any) -> EmbeddingGolden:
    golden = EmbeddingGolden("ms-marco", tmp_path_factory.mktemp("ms-marco"))
    save_tokenizer(golden.folder, "encoder")
    return golden


def test_scores_are_those_of_pairs(reranker: EmbeddingGolden) -> None:
    documents = ["fg", "a document", "x" * 80]
    with serve("--model-id", str(reranker.folder)) as running, Client(running.address) as client:
        raw = client.score("abc", documents[:2], raw_scores=True)
        for document, found in zip(documents, raw, strict=False):
            pair = [*framed("abc"), *ids(document), SEP]
            expected = float(reranker.logits(pair, second=5))
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
        likely = client.score("abc", documents[:2])
        assert likely == pytest.approx([1 / (1 + math.exp(-x)) for x in raw], rel=1e-4)
        with pytest.raises(ServerError, match=r"documents\[2\] has 86 tokens.*at most 66"):
            client.score("abc", documents)
        (_, _, cut) = client.score("abc", documents, truncation="end", raw_scores=True)
        pair = [*framed("abc"), *ids("x" * 60), SEP]
        assert cut == pytest.approx(float(reranker.logits(pair, second=5)), rel=1e-3, abs=1e-4)
        with pytest.raises(ServerError, match="query has 16385 characters; at most 16384"):
            client.score("a" * 16_385, ["b"])
        with pytest.raises(ServerError, match="query is empty"):
            client.score("", ["b"])
        with pytest.raises(ServerError, match=r"instruction is set; this model was not") as later:
            client.score("a", ["b"], instruction="find it")
        assert later.value.code is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(ServerError, match="made to score: call"):
            client.embed(["a"])
        request = tei_pb.RerankRequest(query="abc", texts=documents[:2], return_text=True)
        ranks = tei(running.address).Rerank.Rerank(request, timeout=30).ranks
        best = max(range(2), key=likely.__getitem__)
        assert [rank.index for rank in ranks] == [best, 1 - best]
        assert [rank.text for rank in ranks] == [documents[best], documents[1 - best]]
        assert ranks[0].score == pytest.approx(likely[best], rel=1e-4)
        parts = [tei_pb.RerankStreamRequest(query="abc", text=text) for text in documents[:2]]
        streamed = tei(running.address).Rerank.RerankStream(iter(parts), timeout=30).ranks
        again = [rank.score for rank in streamed]
        assert again == pytest.approx([rank.score for rank in ranks], rel=1e-5)
        many = [tei_pb.RerankStreamRequest(query="abc", text=3_800_000 * "x")] * 9
        with pytest.raises(grpc.RpcError, match=r"342\d+ bytes together; .* takes 33554432 \(8 t"):
            tei(running.address).Rerank.RerankStream(iter(many), timeout=30)
        request.texts[:] = 2 * [1_980_000 * "x"]
        with pytest.raises(grpc.RpcError, match="return_text is set for a request of 39"):
            tei(running.address).Rerank.Rerank(request, timeout=30)
        with pytest.raises(ServerError, match="query has 70 tokens"):
            client.score("a" * 70, ["b"], truncation="end")
        assert running.stop() == 0


def test_labels_have_probabilities(tmp_path: Path) -> None:
    golden = EmbeddingGolden("qwen3-labels", tmp_path)
    save_tokenizer(golden.folder, "decoder")
    with serve("--model-id", str(golden.folder)) as running, Client(running.address) as client:
        found = client.classify(TEXTS)
        for text, scores in zip(TEXTS, found, strict=True):
            expected = golden.logits([*ids(text), SEP]).softmax(-1)
            close(scores.values(), expected)
            assert scores.best == f"LABEL_{int(expected.argmax())}"
        request = tei_pb.PredictRequest(inputs=TEXTS[0])
        predicted = tei(running.address).Predict.Predict(request, timeout=30).predictions
        assert predicted[0].label == found[0].best
        falling = sorted(found[0].values(), reverse=True)
        assert [each.score for each in predicted] == pytest.approx(falling, rel=1e-5)
        assert running.stop() == 0


def test_a_model_that_writes_text_scores_by_yes_and_no(tmp_path: Path) -> None:
    golden = EmbeddingGolden("qwen3-writes", tmp_path)
    save_tokenizer(golden.folder, "decoder")
    # Its words are letters: the question takes a hundred tokens and more.
    flags = ("--model-id", str(golden.folder), "--task", "score")
    with serve(*flags) as running, Client(running.address) as client:
        facts = client.model().embedding
        (found,) = client.score("ab", ["cd"], raw_scores=True)
        (other,) = client.score("ab", ["cd"], raw_scores=True, instruction="I")
        assert running.stop() == 0
    for instruction, raw in ((facts.instruction, found), ("I", other)):
        text = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the"
            ' Query and the Instruct provided. Note that the answer can only be "yes" or "no".'
            f"<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n<Query>: ab\n"
            "<Document>: cd<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        with torch.no_grad():
            logits = golden.model(input_ids=torch.tensor([lines(text)])).logits[0, -1]
        assert raw == pytest.approx(float(logits[4] - logits[5]), rel=1e-3, abs=1e-4)


def lines(text: str) -> list[int]:
    """The same of a text of several lines: what lies between them is one unknown word."""
    return ids(re.sub("\n+", " ", text))


def test_two_ranks_and_two_front_ends_say_the_same(tmp_path: Path) -> None:
    """MPNet's ranks divide the numbers by distance, too; each front end has its own texts."""
    golden = EmbeddingGolden("mpnet", tmp_path)
    save_tokenizer(golden.folder, "encoder")
    flags = ("--model-id", str(golden.folder), "--num-shard", "2", "--front-ends", "2")
    # transformers takes the unknown word, a space, for padding: both are number 1.
    texts = [text for text in TEXTS if " " not in text]
    with serve(*flags) as running:
        clients = [Client(running.address) for _ in range(6)]
        for client in clients:
            with client:
                for text, vector in zip(texts, client.embed(texts), strict=True):
                    close(vector, golden.vector(framed(text)))
        assert running.stop() == 0
