"""What clients ask for who want numbers of texts, as plain values, and what they may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from tokenpod.core.task import SPARSE, VectorFacts
from tokenpod.service.calls.errors import InvalidArgument, Unimplemented
from tokenpod.service.calls.limits import (
    MOST_PRIORITY,
    at_most,
    few_entries,
    refuse,
)

#: Bytes of all vectors of a call: an answer must fit into the 4 MiB that gRPC's clients take.
MOST_VECTOR_BYTES = 4 * 1024 * 1024 - 256 * 1024
#: Of a number of a sparse vector, at most: where it is, and what.
SPARSE_BYTES = 9
#: Characters of a query, of which there is a copy for each document.
MOST_QUERY_CHARACTERS = 16_384


class Truncation(Enum):
    """What becomes of a text that is too long."""

    #: The call is refused.
    NONE = auto()
    #: Its last, or its first, tokens are left out.
    END = auto()
    START = auto()


class VectorFormat(Enum):
    """How numbers are written."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"

    @property
    def size(self) -> int:
        """Bytes of a number."""
        return {"float32": 4, "bfloat16": 2, "int8": 1}[self.value]


@dataclass(frozen=True, slots=True)
class AskedText:
    """A text, or two of which the second is read behind the first, or what it is as tokens."""

    #: Where the client put it, for errors.
    field: str
    text: str | None = None
    second: str | None = None
    tokens: Sequence[int] = ()

    @property
    def memory(self) -> int:
        """About how many bytes it takes."""
        texts = [text for text in (self.text, self.second) if text]
        return 36 * len(self.tokens) + sum(
            len(text) if text.isascii() else 4 * len(text) for text in texts
        )


@dataclass(frozen=True, slots=True)
class ReadCall:
    """A request for numbers of texts."""

    texts: Sequence[AskedText]
    truncation: Truncation = Truncation.NONE
    #: Of `VectorFacts.prompts`; None: the default one.
    prompt_name: str | None = None
    token_vectors: bool = False
    #: Sparse vectors, too.
    sparse: bool = False
    #: Numbers of a vector; None: all.
    dimensions: int | None = None
    #: None: as the model does.
    normalize: bool | None = None
    format: VectorFormat = VectorFormat.FLOAT32
    #: The client's field that makes long texts shorter.
    truncates: str = "truncation"
    request_id: str = ""
    priority: int = 0
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """What such a request may ask for."""

    facts: VectorFacts
    vocab_size: int
    #: Tokens of a text.
    max_tokens: int
    #: Texts of a call.
    max_texts: int
    #: Tokens of all texts of a call.
    max_call_tokens: int

    def width(self, call: ReadCall) -> int:
        """Numbers of each vector of the answer."""
        whole = self.facts.token_width if call.token_vectors else self.facts.width
        return call.dimensions or whole

    def check(self, call: ReadCall, texts_field: str) -> None:
        """Everything that can be said before texts are tokenised.

        `texts_field`: where the client put them. Raises InvalidArgument, or Unimplemented.
        """
        if not call.texts:
            raise InvalidArgument(texts_field, "is empty; at least one text is needed")
        few_entries(texts_field, len(call.texts), self.max_texts, "--max-client-batch-size")
        for text in call.texts:
            self._check_text(text)
        whole = self.facts.token_width if call.token_vectors else self.facts.width
        if call.dimensions is not None and not 1 <= call.dimensions <= whole:
            refuse("dimensions", call.dimensions, f"vectors of this model have 1 to {whole}")
        if call.prompt_name is not None and call.prompt_name not in self.facts.prompts:
            known = ", ".join(map(repr, self.facts.prompts)) or "none"
            raise InvalidArgument(
                "prompt_name", f"is {call.prompt_name[:100]!r}; this model has {known}"
            )
        if call.sparse:
            self._check_sparse(call)
        if not call.token_vectors:
            self.check_bytes(call, len(call.texts))
        if abs(call.priority) > MOST_PRIORITY:
            problem = f"must be from -{MOST_PRIORITY} to {MOST_PRIORITY}"
            refuse("priority", call.priority, problem)

    def check_tokens(self, call: ReadCall, counts: Sequence[int]) -> None:
        """How many tokens texts have, once that is known. Raises InvalidArgument."""
        for text, count in zip(call.texts, counts, strict=True):
            if not count:
                raise InvalidArgument(text.field, "has no tokens; at least 1 is needed")
            if count > self.max_tokens:
                raise InvalidArgument(
                    text.field,
                    f"has {count} tokens; this server allows at most {self.max_tokens}"
                    f" (--max-input-tokens); set `{call.truncates}` to leave some out",
                )
        total = sum(counts)
        if total > self.max_call_tokens:
            raise InvalidArgument(
                call.texts[0].field.partition("[")[0],
                f"has {total} tokens together; this server allows at most {self.max_call_tokens}"
                " (--max-queue-tokens)",
            )
        if call.token_vectors:
            self.check_bytes(call, total)

    def check_bytes(self, call: ReadCall, vectors: int) -> None:
        """Whether so many vectors fit into an answer. Raises InvalidArgument."""
        if call.sparse and self.facts.pooling == SPARSE:
            return  # most of their numbers are 0: what is left is counted when it is there
        size = vectors * self.width(call) * call.format.size
        if size > MOST_VECTOR_BYTES:
            raise InvalidArgument(
                call.texts[0].field.partition("[")[0],
                f"asks for {vectors} vectors of {size} bytes together; at most {MOST_VECTOR_BYTES}"
                " fit into an answer: ask for fewer, or for a smaller format or fewer dimensions",
            )

    def check_sparse_bytes(self, call: ReadCall, numbers: int) -> None:
        """Whether sparse vectors of so many numbers fit into an answer. Raises InvalidArgument."""
        size = numbers * SPARSE_BYTES
        if size > MOST_VECTOR_BYTES:
            raise InvalidArgument(
                call.texts[0].field.partition("[")[0],
                f"has sparse vectors of {size} bytes together; at most {MOST_VECTOR_BYTES} fit into"
                " an answer: ask for fewer",
            )

    def _check_sparse(self, call: ReadCall) -> None:
        if why := self.facts.no_sparse:
            raise InvalidArgument("sparse_vectors", f"is set; {why}")
        if call.token_vectors and not self.facts.word_weights:
            problem = "is set with `sparse_vectors`, which this model makes of vectors of texts"
            raise InvalidArgument("token_vectors", problem)

    def _check_text(self, asked: AskedText) -> None:
        if asked.text is None:
            if not asked.tokens:
                raise InvalidArgument(asked.field, "has neither a text nor tokens")
            if (largest := max(asked.tokens)) >= self.vocab_size:
                problem = f"token ids of this model are below {self.vocab_size}"
                refuse(asked.field, largest, problem)
            at_most(asked.field, len(asked.tokens), MOST_VECTOR_BYTES, None)
        elif not asked.text or asked.second == "":
            raise InvalidArgument(asked.field, "is empty; at least one character is needed")


def pairs_of(
    limits: ReadLimits, query: str, documents: Sequence[str], field: str, instruction: str = ""
) -> list[AskedText]:
    """A query with each of these documents, as the model reads them.

    Args:
        limits: of the model and the server.
        query: the client's `query`.
        documents: the client's `field`.
        field: where the client put them.
        instruction: what the query is about; empty: what the model was trained with.

    Raises:
        InvalidArgument: the documents are too many, or the query is empty, or so long that many
            copies would be a burden.
        Unimplemented: the model does nothing with instructions.
    """
    facts = limits.facts
    few_entries(field, len(documents), limits.max_texts, "--max-client-batch-size")
    if instruction and not facts.template:
        raise Unimplemented("instruction", "is set; this model was not trained with instructions")
    if not query:
        raise InvalidArgument("query", "is empty; at least one character is needed")
    for name, text in (("query", query), ("instruction", instruction)):
        if len(text) > MOST_QUERY_CHARACTERS:
            problem = f"has {len(text)} characters; at most {MOST_QUERY_CHARACTERS} are allowed"
            raise InvalidArgument(name, problem)
    instruction = instruction or facts.instruction
    return [
        AskedText(f"{field}[{at}]", *facts.pair(query, document, instruction))
        for at, document in enumerate(documents)
    ]
