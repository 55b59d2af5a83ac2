"""How a model makes vectors of texts, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tokenpod.core.task import Task, VectorFacts


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

    #: Where its tensors are: names without `.weight`, in the file of this folder; "": the model's.
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

    @property
    def tensors(self) -> list[str]:
        """Names of its tensors, those that may be there included."""
        stems = [self.name] if self.norm is None else [self.name, self.norm]
        return [f"{stem}.{kind}" for stem in stems for kind in ("weight", "bias")]


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """From the states [T, hidden] behind the last norm to the vectors of texts."""

    task: Task
    mode: Mode
    hidden_size: int
    layers: tuple[Dense, ...] = ()
    normalized: bool = False
    #: Whether tokens of an instruction count in the mean.
    pools_prompts: bool = True
    #: Tokens of a text at most, by the model's files; None: as many as it can address.
    max_tokens: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    labels: tuple[str, ...] = ()
    several_labels: bool = False
    before: str = ""
    behind: str = ""
    template: str = ""
    instruction: str = ""

    @property
    def width(self) -> int:
        """Numbers of a text's vector."""
        return self.layers[-1].rows if self.layers else self.hidden_size

    @property
    def tensors(self) -> list[str]:
        """Names of tensors of the model's own files."""
        return [name for layer in self.layers if not layer.folder for name in layer.tensors]

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
            pooling=self.mode.value,
            second_text=second_text,
            several_labels=self.several_labels,
            before=self.before,
            behind=self.behind,
            template=self.template,
            instruction=self.instruction,
        )
