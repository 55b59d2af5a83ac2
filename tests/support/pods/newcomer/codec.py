"""Messages of `newcomer.v1` to plain values and back."""

from __future__ import annotations

from typing import Any

from support.pods.newcomer.messages import message
from tokenpod.service.calls.call import TokensCall
from tokenpod.service.serving.serving import Serving
from tokenpod.service.text.encoder import Tokenised
from tokenpod.service.text.tokenizers.tokenizer import Tokenizer


def tokens_call(request: Any) -> TokensCall:
    """What an `EncodeRequest` asks for."""
    return TokensCall(
        request.inputs,
        add_special_tokens=request.add_special_tokens,
        return_ids=True,
        return_offsets=True,
    )


def encoded(tokenised: Tokenised, tokenizer: Tokenizer) -> Any:
    """An `EncodeResponse`."""
    response = message("EncodeResponse")()
    for at, token in enumerate(tokenised.ids):
        start, stop = tokenised.offsets[2 * at : 2 * at + 2]
        response.tokens.add(
            id=token,
            text=tokenizer.token_text(token),
            special=token in tokenizer.special_ids,
            start=start,
            stop=stop,
        )
    return response


def info(serving: Serving, version: str) -> Any:
    """An `InfoResponse`."""
    return message("InfoResponse")(
        version=version,
        model_id=serving.model_id,
        max_input_length=serving.limits.max_input_tokens,
    )
