"""A client of TGIS in a process of its own, with somebody's stubs: two `fmaas` can't share one.

python tgis_client.py FOLDER ADDRESS     FOLDER has generation_pb2.py and generation_pb2_grpc.py

It prints one JSON object: what each rpc answered.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import grpc

PROMPT = "def fibonacci(n):\n"
GREEDY = {"stopping": {"max_new_tokens": 10}}
DETAILS = {
    **{"input_tokens": True, "generated_tokens": True, "token_logprobs": True, "input_text": True},
}


def main(folder: str, address: str) -> None:
    sys.path.insert(0, folder)
    import generation_pb2 as pb  # type: ignore[import-not-found]
    import generation_pb2_grpc as rpc  # type: ignore[import-not-found]

    with grpc.insecure_channel(address) as channel:
        stub = rpc.GenerationServiceStub(channel)
        print(json.dumps(answers(pb, stub)))


def answers(pb: Any, stub: Any) -> dict[str, Any]:
    single = pb.SingleGenerationRequest(request={"text": PROMPT}, params=GREEDY)
    events = list(stub.GenerateStream(single, timeout=300))
    both = pb.BatchedGenerationRequest(
        requests=[{"text": PROMPT}, {"text": "class Stack:\n"}],
        params={**GREEDY, "response": DETAILS},
    )
    batch = stub.Generate(both, timeout=300).responses
    texts = pb.BatchedTokenizeRequest(
        requests=[{"text": PROMPT}], return_tokens=True, return_offsets=True
    )
    (tokens,) = stub.Tokenize(texts, timeout=300).responses
    info = stub.ModelInfo(pb.ModelInfoRequest(model_id="any"), timeout=300)
    wrong = pb.SingleGenerationRequest(
        request={"text": PROMPT}, params={"sampling": {"top_p": 7.0}}
    )
    try:
        list(stub.GenerateStream(wrong, timeout=300))
        refusal = "none"
    except grpc.RpcError as error:
        refusal = f"{error.code().name}: {error.details()}"
    return {
        "texts": [event.text for event in events],
        "counts": [event.generated_token_count for event in events],
        "reasons": [pb.StopReason.Name(event.stop_reason) for event in events],
        "inputs": [event.input_token_count for event in events],
        "batch": [response.text for response in batch],
        "batch_tokens": [len(response.tokens) for response in batch],
        "batch_logprobs": [len([t for t in r.tokens if t.logprob < 0]) for r in batch],
        "offsets": [[offset.start, offset.end] for offset in tokens.offsets],
        "tokens": list(tokens.tokens),
        "info": [info.max_sequence_length, info.max_new_tokens],
        "refusal": refusal,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
