"""Whole answers, and what their parts are in the form of OpenAI's API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

from tokenpod_client.chats import texts_of
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service


class FunctionCall(TypedDict):
    """The function that a call is of."""

    name: str
    #: JSON text.
    arguments: str


class ToolCall(TypedDict):
    """A call of a tool, as OpenAI's API has it."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionPiece(TypedDict):
    """What an event adds to a call's function."""

    #: In a call's first piece alone.
    name: NotRequired[str]
    arguments: str


class ToolCallPiece(TypedDict):
    """What an event adds to a call, as OpenAI's streams have it."""

    #: Which call of the turn.
    index: int
    #: In a call's first piece alone, as `type` is.
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionPiece


#: OpenAI's words; `time_limit` and `constraint` are of samples that ended by one.
_REASONS = {
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_EOS_TOKEN: "stop",
    pb.FINISH_REASON_STOP_SEQUENCE: "stop",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
    pb.FINISH_REASON_TIME_LIMIT: "time_limit",
    pb.FINISH_REASON_CONSTRAINT: "constraint",
}


@dataclass(frozen=True, slots=True)
class Result:
    """One sample of an answer."""

    #: All that the server says of it.
    finished: pb.Finished

    @property
    def sample_index(self) -> int:
        """Which sample: 0, unless several were asked for."""
        return self.finished.sample_index

    @property
    def text(self) -> str:
        """What was generated, without reasoning and calls where the server tells them apart."""
        return self.finished.text

    @property
    def reasoning(self) -> str:
        """What the model thought before it answered."""
        return self.finished.reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tools that the model called."""
        return [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in self.finished.message.tool_calls
        ]

    @property
    def finish_reason(self) -> str:
        """Why it ended: stop, length, tool_calls, time_limit, constraint, or another's number.

        A text ends with `stop` where the model ends it, or at a stop sequence or token, which
        `finished` names.
        """
        reason = self.finished.finish_reason
        return _REASONS.get(reason, str(reason))

    @property
    def message(self) -> dict[str, Any]:
        """The turn: append it to the messages of a chat, and go on."""
        turn, calls = self.finished.message, self.tool_calls
        text = texts_of(turn.content) if turn.role else self.text
        message: dict[str, Any] = {"role": turn.role or "assistant", "content": text}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        return message


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. What is of one sample is that of the first; `results` has them all."""

    #: All that the server says.
    response: service.GenerateOnceResponse

    @property
    def results(self) -> list[Result]:
        """Each sample, by its index."""
        return [Result(finished) for finished in self.response.results]

    @property
    def text(self) -> str:
        """What the first sample says, without reasoning and calls."""
        return self._first.text

    @property
    def reasoning(self) -> str:
        """What the model thought before it answered."""
        return self._first.reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tools that the model called."""
        return self._first.tool_calls

    @property
    def finish_reason(self) -> str:
        """Why the first sample ended, in OpenAI's words."""
        return self._first.finish_reason

    @property
    def message(self) -> dict[str, Any]:
        """The turn: append it to the messages of a chat, and go on."""
        return self._first.message

    @property
    def started(self) -> pb.Started:
        """How the server took the request."""
        return self.response.started

    @property
    def usage(self) -> pb.Usage:
        """Tokens of the whole call."""
        return self.response.usage

    @property
    def _first(self) -> Result:
        return Result(self.response.results[0])


def piece_of(delta: pb.ToolCallDelta) -> ToolCallPiece:
    """A piece of a call."""
    if not delta.id:
        return {"index": delta.call_index, "function": {"arguments": delta.arguments}}
    return {
        "index": delta.call_index,
        "id": delta.id,
        "type": "function",
        "function": {"name": delta.name, "arguments": delta.arguments},
    }
