"""What a pod does with texts: one thing, by what its checkpoint is."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Task(StrEnum):
    """What a model is for."""

    GENERATE = "generate"
    #: A vector for each text, such that texts of like meaning have like vectors.
    EMBED = "embed"
    #: A number for a query and a document: how well this answers that (a cross-encoder).
    SCORE = "score"
    #: A number for each label.
    CLASSIFY = "classify"

    @property
    def pools(self) -> bool:
        """Whether texts are read for their vectors, and not continued."""
        return self is not Task.GENERATE


#: `VectorFacts.pooling` of vectors with a number for each token of the vocabulary, most of them 0.
SPARSE = "splade"


class VectorFacts(msgspec.Struct, frozen=True, array_like=True):
    """What is known of the vectors that a model makes; files of sentence-transformers say it."""

    #: Numbers of a text's vector, or labels; and of a token's vector.
    width: int
    token_width: int
    #: Vectors are divided by their length.
    normalized: bool = False
    #: Tokens of a text that the model was made for; 0: as many as it can address.
    max_tokens: int = 0
    #: Texts that stand before others, by name, and which of them does where none is named.
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    #: Whether tokens of such a text count in the mean of all.
    pools_prompts: bool = True
    #: Names of the numbers, where they are labels.
    labels: list[str] = []
    #: "cls", "mean", "max", "last_token" or "weighted_mean"; or `SPARSE`.
    pooling: str = ""
    #: Added to the id of a token of a second text, which the model tells from the first; 0: it does
    #: not.
    second_text: int = 0
    #: Each token has a weight, too, as a word of a sparse vector (BGE-M3); why not, if a file that
    #: would say so can't be read.
    word_weights: bool = False
    sparse_problem: str = ""
    #: Labels do not exclude each other.
    several_labels: bool = False
    #: How a query and a document become a text, where the model was trained to answer a question
    #: about them: what stands before it and behind it, and between these the text, in which
    #: `{query}`, `{document}` and `{instruction}` stand for them.
    before: str = ""
    behind: str = ""
    template: str = ""
    #: What the question is about, where a caller does not say.
    instruction: str = ""

    @property
    def no_sparse(self) -> str:
        """Why texts have no sparse vectors; empty: they have."""
        if self.word_weights or self.pooling == SPARSE:
            return ""
        return f"this model has no sparse vectors: {self.sparse_problem or 'its own have no zeros'}"

    def pair(self, query: str, document: str, instruction: str) -> tuple[str, str | None]:
        """A query and a document as the model reads them: a text, or two."""
        if not self.template:
            return query, document
        words = {"instruction": instruction, "query": query, "document": document}
        return self.template.format(**words), None
