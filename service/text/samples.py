"""A call's samples: how each becomes text, where it stops, and what is told from it."""

from __future__ import annotations

from collections.abc import Sequence

from tokenpod.core.requests import Request
from tokenpod.service.calls.call import GenerateCall
from tokenpod.service.calls.chats import ChatPrompt
from tokenpod.service.calls.sample import Sample
from tokenpod.service.serving.serving import Serving
from tokenpod.service.text.parsers.turn import Formats, TurnParser
from tokenpod.service.text.stops import StopMatcher
from tokenpod.service.text.turns import Turn


def samples_of(
    serving: Serving, call: GenerateCall, request: Request, prompt_end: str
) -> Sequence[Sample]:
    """The samples of a call, fresh.

    Args:
        serving: tokenizer, and how the model writes.
        call: what the client asks for.
        request: what the engine is asked.
        prompt_end: what the text of a chat ends with.
    """
    stopping, output = call.stopping, call.output
    formats = serving.formats_for(call)
    return [
        Sample(
            index=index,
            sequence_id=sequence_id,
            detokenizer=serving.tokenizer.detokenizer(
                request.prompt,
                skip_special=output.skip_special_tokens,
                shown=formats.shown,
                spaced=bool(output.spaces_between_special_tokens),
            )
            if output.text or stopping.stop_sequences
            else None,
            stops=StopMatcher(stopping.stop_sequences, include=stopping.include_stop_sequence),
            min_new_tokens=stopping.min_new_tokens,
            streamed=output.stream,
            offsets=output.text_offsets,
            keep_text=output.text and output.final_text,
            turn=_turn(formats, call, prompt_end),
        )
        for index, sequence_id in enumerate(request.reported)
    ]


def _turn(formats: Formats, call: GenerateCall, prompt_end: str) -> Turn | None:
    """Tells a sample's reasoning and calls from its text; None: there is nothing to tell."""
    chat = call.prompt
    if formats == Formats() or not isinstance(chat, ChatPrompt):
        return None
    tools = frozenset(tool.name for tool in chat.tools)
    parser = TurnParser(formats, prompt_end=prompt_end, tools=tools, several=chat.several_calls)
    return Turn(parser, keep=call.output.final_text)
