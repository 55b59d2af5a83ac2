"""What a stream's events come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenpod_client.answers import Answer, ToolCallPiece, piece_of
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service


@dataclass(frozen=True, slots=True)
class Delta:
    """What an event adds to a sample."""

    #: Which sample: 0, unless several were asked for.
    sample_index: int
    text: str
    #: What the model thinks before it answers, where the server tells it from the text.
    reasoning: str
    #: All that the server says of these tokens: ids, log probabilities and so on.
    tokens: pb.Tokens

    @property
    def tool_call(self) -> ToolCallPiece | None:
        """A piece of a tool call; None: the event brings none."""
        tokens = self.tokens
        return piece_of(tokens.tool_call) if tokens.HasField("tool_call") else None


class Reading:
    """What is known of a stream so far. Events of kinds that are not known are passed over."""

    def __init__(self) -> None:
        self.started: pb.Started | None = None
        self.finished: dict[int, pb.Finished] = {}
        self.usage: pb.Usage | None = None
        #: grpc's call, once there is one.
        self.call: Any = None
        self.closed = False

    def take(self, event: pb.GenerateResponse) -> Delta | None:
        """Keep what an event says; the text that it brings, if it brings some."""
        match event.WhichOneof("event"):
            case "started":
                self.started = event.started
            case "tokens":
                new = event.tokens
                return Delta(new.sample_index, new.text, new.reasoning, new)
            case "finished":
                self.finished[event.finished.sample_index] = event.finished
            case "completed":
                self.usage = event.completed.usage
        return None

    def close(self) -> None:
        """Cancel the call, and make no other."""
        self.closed = True
        if self.call is not None:
            self.call.cancel()


class StreamState:
    """What a stream has told beside its text."""

    def __init__(self) -> None:
        # What reads does not hold this object, so that nobody reads on once it is gone.
        self._reading = Reading()

    @property
    def started(self) -> pb.Started | None:
        """How the server took the request; None until it has."""
        return self._reading.started

    @property
    def finished(self) -> dict[int, pb.Finished]:
        """How each sample ended, by its index."""
        return self._reading.finished

    @property
    def usage(self) -> pb.Usage | None:
        """Of the whole call; None until its end."""
        return self._reading.usage

    def _whole(self) -> Answer:
        """The answer of a stream that has been read to its end. Raises RuntimeError if it was not.

        Its texts are those of `Finished`, so it has none with `return_final_text` false.
        """
        if self.usage is None:
            raise RuntimeError("the stream was closed before its end: there is no whole answer")
        results = [finished for _, finished in sorted(self.finished.items())]
        return Answer(
            service.GenerateOnceResponse(started=self.started, results=results, usage=self.usage)
        )
