"""A process that tokenises and renders: `python -m tokenpod.service.text.workers.text_worker FD`.

A template is a program, and its messages are the caller's; a tokenizer's time and memory hang on
the text. Neither can be bounded from inside a process that must go on, so they run here: the kernel
limits the memory, and the front end kills the process when a call's time is over (worker_pool.py).
Neither torch nor grpc is imported.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any

from msgspec import structs

from tokenpod.core.constraints import Tagged
from tokenpod.service.calls.chats import ChatPrompt, Tool
from tokenpod.service.constraints.json_schema import (
    MOST_SCHEMAS,
    SchemaError,
    TooManySchemas,
    check_schema,
    read_schema,
)
from tokenpod.service.images.expansions import ImageTexts
from tokenpod.service.text.parsers.calls import CallFormat, ToolCallShape, ToolsError
from tokenpod.service.text.parsers.turn import CALL_FORMATS
from tokenpod.service.text.tokenizers.chat_template import ChatTemplateError
from tokenpod.service.text.tokenizers.tokenizer import TextModel, Tokenizer, TokenizerPanic
from tokenpod.service.text.workers.text_messages import (
    EncodeChat,
    Encoded,
    EncodeTexts,
    FromWorker,
    Job,
    Text,
    ToWorker,
    WorkerOptions,
    packed,
)
from tokenpod.service.workers.worker import Loaded, Refusal, Refused, refused, work

#: Characters at the end of a rendered chat that are sent to a front end.
_RENDERED_END = 64


def _load(options: WorkerOptions) -> tuple[Loaded, Callable[[Job], FromWorker]]:
    model = TextModel.read(options.model)
    os.close(options.model)
    return Loaded(), partial(_answer, Tokenizer.of_model(model))


def _answer(tokenizer: Tokenizer, job: Job) -> FromWorker:
    try:
        if isinstance(job, EncodeChat):
            calls = _calls(tokenizer, job) if job.call_format else None
            if isinstance(calls, Refused):
                return calls
            rendered = tokenizer.render_chat(job.chat)
            if job.images is not None:
                rendered = with_images(rendered, job.chat, job.images)
            # Templates write special tokens: none is added.
            encoded = _encoded(tokenizer, EncodeTexts([Text(rendered, False, job.keep)]))
            end = rendered[-_RENDERED_END:]
            return structs.replace(encoded, rendered_end=end, calls=calls)
        return _encoded(tokenizer, job)
    except ChatTemplateError as error:
        return Refused(Refusal.JOB, str(error), error.field)
    except TokenizerPanic as error:
        return Refused(Refusal.LIBRARY, str(error))
    except Exception as error:
        return refused(error)


def _calls(tokenizer: Tokenizer, job: EncodeChat) -> Tagged | Refused:
    """How the tools of a chat may be called, or why there is no constraint for it."""
    (calls,) = (each for each in CALL_FORMATS if each.name == job.call_format)
    try:
        return calls_constraint(job.chat, calls, tokenizer.template_source or "")
    except ToolsError as error:
        return Refused(Refusal.JOB, str(error), "tools")
    except MemoryError:
        raise
    except Exception as error:
        traceback.print_exc()
        return Refused(Refusal.FAULT, type(error).__name__)


def _encoded(tokenizer: Tokenizer, job: EncodeTexts) -> Encoded:
    counts, parts, places = [], [], []
    for text in job.texts:
        # One by one: what a text took is free again before the next.
        offsets: list[int] = []
        if text.offsets:
            ids, offsets = tokenizer.encode_offsets(text.text, add_special_tokens=text.special)
        else:
            (ids,) = tokenizer.encode_all([text.text], add_special_tokens=text.special)
        left_out = max(len(ids) - text.keep, 0)
        counts.append(len(ids))
        if text.first:
            ids, left_out = ids[: text.keep], 0
        parts.append(packed(ids[left_out:]))
        places.append(packed(offsets[2 * left_out :]))
    return Encoded(counts, parts, places)


# -- images in a rendered chat ------------------------------------------------------------------


def with_images(rendered: str, chat: ChatPrompt, images: ImageTexts) -> str:
    """A rendered chat with the tokens that stand for its images.

    Raises ChatTemplateError if a text of the chat has the token itself (CVE-2026-44222), or if the
    template does not write one for each image.
    """
    for at, message in enumerate(chat.messages):
        for name in ("content", "reasoning", "role", "name"):
            _check(getattr(message, name), f"messages[{at}].{name}", images)
        for number, call in enumerate(message.tool_calls):
            _check(call.arguments, f"messages[{at}].tool_calls[{number}].arguments", images)
            _check(call.name, f"messages[{at}].tool_calls[{number}].name", images)
    pieces = rendered.split(images.token)
    places, count = len(pieces) - 1, len(images.expansions)
    if places != count:
        raise ChatTemplateError(
            f"the model's chat template has {places} places for images, of which there are {count}"
        )
    parts = [pieces[0]]
    for expansion, piece in zip(images.expansions, pieces[1:], strict=True):
        parts += [expansion, piece]
    return "".join(parts)


def _check(text: str, field: str, images: ImageTexts) -> None:
    if problem := images.forbidden(text):
        raise ChatTemplateError(problem, field)


# -- calls of tools as constraints -------------------------------------------------------------

#: Of a tool whose schema can't be compiled, and of one that has no arguments.
_ANY: Mapping[str, Any] = {"type": "object"}
_NONE: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def calls_constraint(chat: ChatPrompt, calls: CallFormat, template: str) -> Tagged:
    """How the model may, or must, call the tools of a chat.

    A tool's schema says what its arguments are for the model too, so one that is not supported is
    no fault of the request: its arguments are then any JSON object.

    Args:
        chat: with tools.
        calls: how the model writes calls.
        template: the model's chat template.

    Raises:
        ToolsError: the tools have too many schemas.
    """
    shapes, left = [], MOST_SCHEMAS
    for tool in chat.tools:
        if not chat.only or tool.name == chat.only:
            schema, count = _arguments_of(tool, left)
            left -= count
            shapes.append(ToolCallShape(tool.name, schema))
    tagged = calls.tagged(shapes, template, must=chat.must_call)
    # Where all is between marks, a turn without a call has tags too.
    one = chat.only or not chat.several_calls
    most = 1 if one and (chat.must_call or not calls.framed) else None
    least = 1 if chat.must_call or tagged.before else 0
    return structs.replace(tagged, least=least, most=most, lenient=True)


def _arguments_of(tool: Tool, most: int) -> tuple[Mapping[str, Any], int]:
    """The schema of a tool's arguments, and how many schemas it holds: `most` at most."""
    if not tool.schema:
        return _NONE, 0
    try:
        schema = read_schema(tool.schema)
        count = _end(check_schema(schema, most))
    except TooManySchemas:
        raise ToolsError(f"have more than {MOST_SCHEMAS} schemas") from None
    except SchemaError:
        return _ANY, 0
    return (schema if "type" in schema else {"type": "object"} | schema), count


def _end(work: Generator[None, None, int]) -> int:
    """What work comes to that need not be divided here."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            return int(done.value)


if __name__ == "__main__":
    sys.exit(work(ToWorker, _load))
