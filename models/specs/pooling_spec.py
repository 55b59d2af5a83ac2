"""How a model makes vectors of texts, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tokenpod.core.task import SPARSE, Task, VectorFacts


class Mode(StrEnum):
    """How the states of a text's tokens become one vector."""

    #: The first token's.
    CLS = "cls"
    MEAN = "mean"
    MAX = "max"
    LAST_TOKEN = "last_token"  # noqa: S105 (no secret)
    #: The mean, of which token number i counts i times (Muennighoff 2022).
    WEIGHTED_MEAN = "weighted_mean"


@dataclass(frozen=True, slots=True)
class Dense:
    """A product of what was pooled, and what follows it."""

    #: Where its tensors are: names without `.weight`, in this file, or in that of this folder; "":
    #: the model's.
    name: str
    folder: str
    rows: int
    columns: int
    bias: bool
    #: A key of `ACTIVATIONS` in `head`.
    activation: str = "identity"
    #: Of a layer norm behind the activation; None: there is none.
    norm: str | None = None
    norm_epsilon: float = 1e-5
    #: The product's one row is the difference of these two of the tensor; None: it has all rows.
    difference: tuple[int, int] | None = None
    #: What the weight is where it has no tensor of its own, and another name of the bias.
    tied: str = ""
    other_bias: str = ""

    def tensor(self, kind: str) -> str:
        """The name of its "weight" or "bias"."""
        return f"{self.name}.{kind}" if self.name else kind

    @property
    def tensors(self) -> list[str]:
        """Names of its tensors, those that may be there included."""
        stems = [self.name] if self.norm is None else [self.name, self.norm]
        own = [f"{stem}.{kind}" for stem in stems for kind in ("weight", "bias")]
        return [*own, self.other_bias] if self.other_bias else own


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """From the states [T, hidden] behind the last norm to the vectors of texts."""

    task: Task
    mode: Mode
    hidden_size: int
    #: Of each token, before they are pooled: to scores of the vocabulary.
    token_layers: tuple[Dense, ...] = ()
    layers: tuple[Dense, ...] = ()
    #: How often what was pooled, and is above 0, becomes log(1 + x), which leaves a vector with few
    #: numbers (SPLADE: Formal et al. 2021).
    logarithms: int = 0
    normalized: bool = False
    #: Whether tokens of an instruction count in the mean.
    pools_prompts: bool = True
    #: Tokens of a text at most, by the model's files; None: as many as it can address.
    max_tokens: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    labels: tuple[str, ...] = ()
    several_labels: bool = False
    #: From a token's state to what it weighs as a word of a sparse vector; None: that is not known,
    #: because of `sparse_problem`, or because no such model is known.
    word_layer: Dense | None = None
    sparse_problem: str = ""
    before: str = ""
    behind: str = ""
    template: str = ""
    instruction: str = ""

    @property
    def width(self) -> int:
        """Numbers of a text's vector."""
        layers = self.layers or self.token_layers
        return layers[-1].rows if layers else self.hidden_size

    @property
    def tensors(self) -> list[str]:
        """Names of tensors of the model's own files."""
        layers = self.token_layers + self.layers
        return [name for layer in layers if not layer.folder for name in layer.tensors]

    def facts(self, second_text: int) -> VectorFacts:
        """What `GetModel` and the limits of calls need; `second_text`: `ModelSpec.second_text`."""
        return VectorFacts(
            width=self.width,
            token_width=self.hidden_size,
            normalized=self.normalized,
            max_tokens=self.max_tokens or 0,
            prompts=self.prompts,
            default_prompt=self.default_prompt,
            pools_prompts=self.pools_prompts,
            labels=list(self.labels),
            pooling=SPARSE if self.logarithms else self.mode.value,
            word_weights=self.word_layer is not None,
            sparse_problem=self.sparse_problem,
            second_text=second_text,
            several_labels=self.several_labels,
            before=self.before,
            behind=self.behind,
            template=self.template,
            instruction=self.instruction,
        )
