"""What a pod serves, once its model is ready, and what one request may ask of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from tokenpod.core.constraints import Constraint, Grammar, Reasoned, Tag, Tagged, compacted
from tokenpod.core.messages import Ready
from tokenpod.core.requests import Request
from tokenpod.service.calls.call import AskedConstraint, GenerateCall
from tokenpod.service.calls.chats import ChatPrompt
from tokenpod.service.calls.errors import FailedPrecondition, InvalidArgument, Unimplemented
from tokenpod.service.calls.limits import RequestLimits
from tokenpod.service.calls.sample import Sample
from tokenpod.service.config.sources import ServerSettings, SettingsError
from tokenpod.service.constraints.asked import constraint_of
from tokenpod.service.pod.client import EngineClient
from tokenpod.service.serving.adapters import Adapters
from tokenpod.service.serving.cache_feed import CacheFeed
from tokenpod.service.serving.images import Images
from tokenpod.service.text.encoder import Encoder, Tokenised
from tokenpod.service.text.parsers.calls import CallFormat
from tokenpod.service.text.parsers.turn import Formats, TurnParser
from tokenpod.service.text.reader import StopMatcher, TextReader
from tokenpod.service.text.tokenizer_archive import TokenizerArchive
from tokenpod.service.text.tokenizers.tokenizer import Tokenizer

#: Of answers that are all text.
_NOT_TOLD = Formats()


@dataclass(frozen=True, slots=True)
class Serving:
    """Engine, tokenizer and limits, once the model is ready."""

    client: EngineClient
    encoder: Encoder
    limits: RequestLimits
    settings: ServerSettings
    ready: Ready
    #: What changes in the prefix cache; the first front end alone hears of it.
    cache: CacheFeed
    #: How the model writes reasoning and calls of tools.
    formats: Formats
    archive: TokenizerArchive
    #: Of calls.
    images: Images
    adapters: Adapters = field(default_factory=lambda: Adapters(0))
    #: The model's name for clients.
    model_id: str = ""
    #: When it became ready, in nanoseconds since 1970.
    since: int = field(default_factory=time.time_ns)

    def formats_for(self, call: GenerateCall) -> Formats:
        """What is parsed from the text that answers a call."""
        chat = call.prompt
        if call.output.raw_text or not isinstance(chat, ChatPrompt):
            return _NOT_TOLD
        calls = self.formats.calls
        looked_for = calls is not None and (chat.tools or calls.framed)
        return self.formats if looked_for else replace(self.formats, calls=None)

    def samples_of(self, call: GenerateCall, request: Request, prompt_end: str) -> list[Sample]:
        """New samples of a call: how tokens become text, where it stops, how tool calls are parsed.

        Args:
            call: what the client asks for.
            request: what the engine is asked.
            prompt_end: what the text of a chat ends with.
        """
        output, formats = call.output, self.formats_for(call)
        return [
            Sample(
                index=index,
                sequence_id=sequence_id,
                reader=self._reader(call, request, formats, prompt_end),
                min_new_tokens=call.stopping.min_new_tokens,
                streamed=output.stream,
                offsets=output.text_offsets,
                keep_text=output.text and output.final_text,
            )
            for index, sequence_id in enumerate(request.reported)
        ]

    def _reader(
        self, call: GenerateCall, request: Request, formats: Formats, prompt_end: str
    ) -> TextReader | None:
        output, stopping, chat = call.output, call.stopping, call.prompt
        if not output.text and not stopping.stop_sequences:
            return None
        parser = None
        shown = frozenset[str]()
        if formats != _NOT_TOLD and isinstance(chat, ChatPrompt):
            shown = formats.shown
            schemas = {tool.name: tool.schema for tool in chat.tools}
            parser = TurnParser(
                formats,
                prompt_end=prompt_end,
                tools=schemas.keys(),
                several=chat.several_calls,
                schemas=schemas,
            )
        detokenizer = self.tokenizer.detokenizer(
            request.prompt,
            skip_special=output.skip_special_tokens,
            shown=shown,
            spaced=bool(output.spaces_between_special_tokens),
        )
        stops = None
        if stopping.stop_sequences:
            stops = StopMatcher(stopping.stop_sequences, include=stopping.include_stop_sequence)
        return TextReader(detokenizer, stops, parser)

    async def constraint_of(self, asked: AskedConstraint | None) -> Constraint | None:
        """The constraint in the engine's form. Raises InvalidArgument or Unimplemented."""
        if asked is None:
            return None
        self._check_bytes(asked.field)
        return self._compacted(await constraint_of(asked))

    def _compacted(self, constraint: Constraint) -> Constraint:
        """With as much whitespace in JSON as the operator lets it have."""
        return compacted(constraint) if self.settings.compact_json else constraint

    async def conforming(self, call: GenerateCall, prompt: Tokenised) -> Constraint | None:
        """What the answer to a call must conform to: its constraint, or calls of its tools.

        Args:
            prompt: the call's, which may have begun the reasoning.

        Raises InvalidArgument or Unimplemented.
        """
        answer = await self.constraint_of(call.constraint)
        if answer is None and prompt.calls is not None:
            answer = self._compacted(prompt.calls)
        reasoning = self.formats.reasoning
        if not isinstance(call.prompt, ChatPrompt) or answer is None or reasoning is None:
            return answer
        if isinstance(answer, Grammar | Reasoned):
            return answer
        if reasoning.answers and not isinstance(answer, Tagged):
            tags = tuple(Tag(begin, answer, "") for begin in reasoning.answers)
            answer = Tagged(tags, most=1)
        is_open = reasoning.is_open(prompt.rendered_end)
        return Reasoned(reasoning.begin, reasoning.end, is_open, answer)

    def called_by(self, call: GenerateCall) -> CallFormat | None:
        """How the answer to a call must write calls of its tools; None: it may as it likes.

        Raises InvalidArgument or Unimplemented.
        """
        chat, calls = call.prompt, self.formats.calls
        if not isinstance(chat, ChatPrompt) or not chat.tools or calls is None:
            return None
        if call.constraint is not None:
            problem = "can't be combined with chat.tools, unless chat.tool_choice is none"
            raise InvalidArgument(call.constraint.field, problem)
        if chat.must_call:
            self._check_bytes("chat.tool_choice")
            if call.beam is not None:
                problem = "can't be combined with a call of a tool that must be made"
                raise InvalidArgument("sampling.beam", problem)
        elif call.output.raw_text or call.beam is not None or not self.tokenizer.tells_bytes:
            return None
        return calls

    def _check_bytes(self, field: str) -> None:
        if not self.tokenizer.tells_bytes:
            problem = "can't be served with this model: its tokens stand for no bytes of their own"
            raise Unimplemented(field, problem)

    def check_tools(self, call: GenerateCall) -> None:
        """Raise FailedPrecondition for a call with tools if calls of them would be text."""
        chat = call.prompt
        if not isinstance(chat, ChatPrompt) or not chat.tools or self.formats.calls is not None:
            return
        if chat.must_call or not call.output.raw_text:
            set_to = self.settings.tool_parser
            why = (
                ", and the model's chat template shows no form of calls" if set_to == "auto" else ""
            )
            raise FailedPrecondition(
                f"chat.tools: this server does not tell calls of tools from text (--tool-parser is"
                f" {set_to}{why}): name a parser there, or set output.raw_text, and they are text"
            )

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self.encoder.tokenizer


def check_limits(settings: ServerSettings, ready: Ready) -> None:
    """Raise SettingsError for a limit beyond what the model and its KV cache can do."""
    total, most_in = settings.max_total_tokens, settings.max_input_tokens
    if total is not None and total > ready.slots:
        raise SettingsError(f"--max-total-tokens is {total}: the KV cache holds {ready.slots}")
    room = request_limits(settings, ready).max_total_tokens
    if most_in is not None and most_in >= room + ready.task.pools:
        raise SettingsError(
            f"--max-input-tokens is {most_in}: a prompt and its output have {room} at most, by the"
            " model's context, the KV cache and --max-total-tokens"
        )


def request_limits(settings: ServerSettings, ready: Ready) -> RequestLimits:
    """What one request may ask for, by the operator's settings and the model's."""
    total = min(settings.max_total_tokens or ready.max_positions, ready.max_positions, ready.slots)
    most_in = settings.max_input_tokens or settings.most_whole_prompt or total - 1
    return RequestLimits(
        vocab_size=ready.vocab_size,
        max_input_tokens=min(most_in, total - 1),
        max_total_tokens=total,
        max_samples=settings.max_best_of,
        max_stop_sequences=settings.max_stop_sequences,
        max_stop_sequence_bytes=settings.max_stop_sequence_bytes,
        max_top_n_tokens=settings.max_top_n_tokens,
        max_logit_bias=settings.max_logit_bias,
        max_constraint_bytes=settings.max_constraint_bytes,
        slots=ready.slots,
        rows=ready.rows or settings.resolved_batch_size,
        drafts=ready.speculate,
    )
