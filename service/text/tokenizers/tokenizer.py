"""A model folder's tokenizer: text to ids, chats to ids, ids to text.

Neither torch nor, as a rule, transformers is imported: `tokenizer.json` says everything.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer as Backend

from tokenpod.service.calls.chats import ChatPrompt
from tokenpod.service.text.tokenizers.chat_template import ChatTemplate, ChatTemplateError
from tokenpod.service.text.tokenizers.decoding import Decoding, Detokenizer, Spaced
from tokenpod.service.text.tokenizers.detokenizer import decoding_of
from tokenpod.service.text.tokenizers.tokenizer_files import (
    TokenizerError,
    TokenizerPanic,
    check_vocabulary,
    panics_named,
    read_folder,
)

__all__ = ["Tokenizer", "TokenizerError", "TokenizerPanic"]


class TextModel(msgspec.Struct, frozen=True, array_like=True):
    """What a worker tokenises and renders with; it reads no file of the model's folder.

    Args:
        tokenizer: a whole `tokenizer.json`.
        chat_template: source; None: the model has none.
        special_tokens: the template's variables (`bos_token`, ...).
    """

    tokenizer: bytes
    chat_template: str | None
    special_tokens: dict[str, str]

    @classmethod
    def read(cls, descriptor: int) -> TextModel:
        """That of a file that holds one."""
        # Mapped, not read: all processes share the descriptor, and with it the place in the file.
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            return msgspec.msgpack.decode(view, type=cls)


class Tokenizer:
    """Text to ids and back, exactly as the model was trained.

    `vocab_size` is the number of ids, added tokens included; `special_ids` are those that text
    never shows; `eos_token_ids` end a sequence.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
    ) -> None:
        # Files of trained models carry settings for batches; a server's prompts are whole.
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids = eos_token_ids
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._decoding = decoding_of(backend, self.special_ids)
        self._decodings: dict[frozenset[str], Decoding] = {frozenset(): self._decoding}
        self._template_source = chat_template
        self._special_tokens = special_tokens or {}

    @classmethod
    def load(cls, folder: Path, chat_template: str | None = None) -> Tokenizer:
        """Load from a model's folder.

        `tokenizer.json` is read, or else a vocabulary of another format is converted (see
        conversion.py); beside it `tokenizer_config.json`, `special_tokens_map.json`, chat templates
        (see template_files.py), `generation_config.json` and `config.json`, where they exist.

        `chat_template` is the name of one of the model's templates, or a file; None: the default.

        TokenizerError: a file is missing or broken, or it is another model's.
        """
        files = read_folder(folder, chat_template)
        return cls(
            files.backend,
            eos_token_ids=files.eos_token_ids,
            chat_template=files.chat_template,
            special_tokens=files.special_tokens,
        )

    @classmethod
    def of_model(cls, model: TextModel) -> Tokenizer:
        """A tokenizer that encodes and renders as the one that made `model` (`text_model`)."""
        return cls(
            Backend.from_buffer(model.tokenizer),
            chat_template=model.chat_template,
            special_tokens=model.special_tokens,
        )

    def text_model(self) -> TextModel:
        """What another process needs to encode and render as this one; takes a while."""
        return TextModel(
            self._backend.to_str().encode(), self._template_source, self._special_tokens
        )

    def check(self, size: int) -> None:
        """Raise TokenizerError if this is not the tokenizer of a model with so many rows."""
        check_vocabulary(self.vocab_size, self.vocab_size, size, "the model's folder")

    @property
    def backend(self) -> Backend:
        """The library's tokenizer. Not to be changed."""
        return self._backend

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; special tokens written out in it become their ids.

        TokenizerPanic: the library fails on this text.
        """
        with panics_named():
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the ids of each text, as `encode` does, and let other threads run meanwhile.

        `encode` keeps the interpreter's lock: quick, but no text that is long may go there.

        TokenizerPanic: as `encode`.
        """
        with panics_named():
            encodings = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
            return [encoding.ids for encoding in encodings]

    def encode_offsets(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[int]]:
        """Return ids as `encode_all` does, and where each begins and ends in `text`, in turn.

        Offsets are in code points. TokenizerPanic: as `encode`.
        """
        with panics_named():
            (found,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
            return found.ids, [end for pair in found.offsets for end in pair]

    def render_chat(self, chat: ChatPrompt) -> str:
        """Return the prompt that the model's template makes of a conversation.

        ChatTemplateError: there is no template, it is broken, or it refuses the conversation.
        """
        template = self._chat_template
        if isinstance(template, ChatTemplateError):
            raise ChatTemplateError(str(template))
        return template.render(chat)

    @functools.cached_property
    def _chat_template(self) -> ChatTemplate | ChatTemplateError:
        """Compiled when it is first used: compiling evaluates constants, at whatever cost."""
        return _compiled(self._template_source, self._special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token alone: a special token's name, '' outside the vocabulary."""
        return self._decoding.token_text(token_id)

    @property
    def tells_bytes(self) -> bool:
        """Whether each token adds bytes of its own to a text, as constraints need it."""
        return self._decoding.token_bytes(0) is not None

    def token_bytes(self) -> tuple[list[bytes], list[int]] | None:
        """Return what each token adds to a text, by id, and which are special: those have names.

        Takes a tenth of a second for 100,000 tokens. None: what a token adds depends on others.
        """
        found = [self._decoding.token_bytes(token_id) for token_id in range(self.vocab_size)]
        for token_id in self.special_ids:
            if token_id < len(found):
                found[token_id] = (self._backend.id_to_token(token_id) or "").encode()
        known = [token for token in found if token is not None]
        return (known, sorted(self.special_ids)) if len(known) == len(found) else None

    @property
    def template_source(self) -> str | None:
        """The chat template, as it came with the model; None: there is none."""
        return self._template_source

    @functools.cached_property
    def _with_special(self) -> Decoding:
        """Decodes special tokens as the vocabulary's; made when it is first asked for."""
        return decoding_of(self._backend, frozenset())

    def detokenizer(
        self,
        prompt_ids: Sequence[int],
        *,
        skip_special: bool = True,
        shown: frozenset[str] = frozenset(),
        spaced: bool = False,
    ) -> Detokenizer:
        """Return a detokenizer for the sequence that follows `prompt_ids`.

        Args:
            prompt_ids: what precedes.
            skip_special: special tokens are no text, but those that are `shown`.
            shown: names of special tokens, and of what may be none.
            spaced: put spaces around special tokens, where they are text.

        The prompt is whole text: a character that it leaves incomplete is never completed. Its last
        token that isn't special decides whether a leading space is text.
        """
        if skip_special:
            return self._showing(shown).detokenizer(prompt_ids)
        made = self._with_special.detokenizer(prompt_ids)
        return Spaced(made, self.special_ids) if spaced else made

    def _showing(self, names: frozenset[str]) -> Decoding:
        """Decodes these special tokens as the vocabulary's; made when it is first asked for."""
        if names not in self._decodings:
            shown = {self._backend.token_to_id(name) for name in names} & self.special_ids
            hidden = self.special_ids - shown
            made = decoding_of(self._backend, hidden) if shown else self._decoding
            self._decodings[names] = made
        return self._decodings[names]


def _compiled(
    source: str | None, special_tokens: dict[str, str]
) -> ChatTemplate | ChatTemplateError:
    """Return the template, or why there is none: a model without one still completes text."""
    if source is None:
        return ChatTemplateError("this model has no chat template: send a prompt instead")
    try:
        return ChatTemplate(source, special_tokens)
    except ChatTemplateError as error:
        return error
