"""What a pod serves, once its model is ready, and what one request may ask of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from tokenpod.core.messages import Ready
from tokenpod.service.config import ServerSettings, SettingsError
from tokenpod.service.dialects import validate
from tokenpod.service.pod.client import EngineClient
from tokenpod.service.rpc.errors import FailedPrecondition
from tokenpod.service.serving.cache_feed import CacheFeed
from tokenpod.service.serving.calls import GenerateCall
from tokenpod.service.serving.chats import ChatPrompt
from tokenpod.service.text.encoder import Encoder
from tokenpod.service.text.parsers.turn import Formats
from tokenpod.service.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Serving:
    """Engine, tokenizer and limits, once the model is ready."""

    client: EngineClient
    encoder: Encoder
    limits: validate.RequestLimits
    settings: ServerSettings
    ready: Ready
    #: What changes in the prefix cache; the first front end alone hears of it.
    cache: CacheFeed
    #: How the model writes reasoning and calls of tools.
    formats: Formats
    #: When it became ready, in nanoseconds since 1970.
    since: int = field(default_factory=time.time_ns)

    @property
    def model_id(self) -> str:
        """The model's name for clients."""
        return self.settings.served_name

    def formats_for(self, call: GenerateCall) -> Formats:
        """What is to be told from the text that answers a call."""
        chat = call.prompt
        if call.output.raw_text or not isinstance(chat, ChatPrompt):
            return Formats()
        return self.formats if chat.tools else replace(self.formats, calls=None)

    def check_tools(self, call: GenerateCall) -> None:
        """Raise FailedPrecondition for a call with tools if calls of them would be text."""
        tools = isinstance(call.prompt, ChatPrompt) and call.prompt.tools
        if tools and not call.output.raw_text and self.formats.calls is None:
            raise FailedPrecondition(
                "chat.tools: this server does not tell calls of tools from text (--tool-parser"
                f" {self.settings.tool_parser}); with output.raw_text they are text"
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
    if most_in is not None and most_in >= room:
        raise SettingsError(
            f"--max-input-tokens is {most_in}: a prompt and its output have {room} at most, by the"
            " model's context, the KV cache and --max-total-tokens"
        )


def request_limits(settings: ServerSettings, ready: Ready) -> validate.RequestLimits:
    """What one request may ask for, by the operator's settings and the model's."""
    total = min(settings.max_total_tokens or ready.max_positions, ready.max_positions, ready.slots)
    most_in = settings.max_input_tokens or settings.most_whole_prompt or total - 1
    return validate.RequestLimits(
        vocab_size=ready.vocab_size,
        max_input_tokens=min(most_in, total - 1),
        max_total_tokens=total,
        max_samples=settings.max_best_of,
        max_stop_sequences=settings.max_stop_sequences,
        max_stop_sequence_bytes=settings.max_stop_sequence_bytes,
        max_top_n_tokens=settings.max_top_n_tokens,
        max_logit_bias=settings.max_logit_bias,
        slots=ready.slots,
        rows=ready.rows or settings.resolved_batch_size,
        drafts=ready.speculate,
    )
