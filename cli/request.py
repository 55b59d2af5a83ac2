"""`tokenpod generate`: the fields of its request as options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from tokenpod_client.cli.options import option

UINT32 = 2**32 - 1

_output = partial(option, panel="Output", show_default=False)
_stopping = partial(option, panel="Stopping", show_default=False)
_sampling = partial(option, panel="Sampling", show_default=False)
_constraint = partial(option, panel="Constraint (one of them)", show_default=False)
_stop_count = partial(_stopping, min=0, max=UINT32, default=0)
_sampling_count = partial(_sampling, min=0, max=UINT32, default=0)


def _text_or_file(name: str, given: str) -> str:
    """The text, or for @FILE what is in it. Raises BadParameter for a file that can't be read."""
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except OSError as error:
        problem = f"is {given}: {error.strerror}"
    except UnicodeDecodeError:
        problem = f"is {given}: not UTF-8"
    raise click.BadParameter(problem, param_hint=_flag(name))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


#: Fields of `Constraint`, and what makes their values of an option's name and value.
_CONSTRAINTS: dict[str, Callable[[str, Any], Any]] = {
    "json_schema": _text_or_file,
    "json_object": lambda name, given: True,
    "regex": _text_or_file,
    "grammar": _text_or_file,
    "choice": lambda name, given: given,
    "structural_tag": _text_or_file,
}


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Fields of `GenerateRequest` and of its parts, by their names. None leaves a field unset.

    `stream` is none of them: it chooses the rpc.
    """

    stream: bool = _output("Text as it comes.", flag="--stream/--no-stream", default=True)
    return_logprobs: bool = _output("Log probabilities (--json).", flag="--logprobs", default=False)
    top_n_tokens: int = _output("Most likely tokens (--json).", min=0, max=UINT32, default=0)
    return_prompt_logprobs: bool = _output(
        "The prompt's log probabilities (--json).", flag="--prompt-logprobs", default=False
    )
    max_new_tokens: int | None = _stop_count("Tokens at most.", default=None)
    min_new_tokens: int | None = _stop_count("Tokens at least.", default=None)
    stop_sequences: list[str] | None = _stopping(
        "Stop at this text. Repeatable.", flag="--stop-sequence"
    )
    stop_token_ids: list[int] | None = _stop_count(
        "Stop at this token. Repeatable.", "ID", flag="--stop-token-id", default=None
    )
    ignore_eos: bool = _stopping(
        "Go on after an end-of-text token.", flag="--ignore-eos", default=False
    )
    include_stop_sequence: bool = _stopping(
        "Leave it in the text.", flag="--include-stop-sequence", default=False
    )
    time_limit: float | None = _stopping(
        "Finish after so long and keep the text.", "SECONDS", min=0
    )
    truncate: int | None = _stop_count("Keep the prompt's last N tokens.", default=None)
    do_sample: bool | None = _sampling(
        "Sample, or take the most likely.", flag="--do-sample/--no-do-sample"
    )
    temperature: float | None = _sampling("Divides the logits.")
    top_k: int | None = _sampling_count("Only the k most likely tokens.", default=None)
    top_p: float | None = _sampling("Only the nucleus of this mass.")
    min_p: float | None = _sampling("Only tokens this likely, relative to the most likely.")
    typical_p: float | None = _sampling("Locally typical mass.")
    repetition_penalty: float | None = _sampling("1 is none.")
    presence_penalty: float | None = _sampling("-2 to 2.")
    frequency_penalty: float | None = _sampling("-2 to 2.")
    logit_bias: list[str] | None = _sampling("Add to a token's logit. Repeatable.", "ID=BIAS")
    bad_words: list[str] | None = _sampling(
        "A word that the output never has. Repeatable.", "TEXT", flag="--bad-word"
    )
    seed: int | None = _sampling("", min=0, max=2**64 - 1)
    watermark: bool = _sampling("Mark the text.", flag="--watermark", default=False)
    n: int | None = _sampling_count("Samples to return.", default=None)
    best_of: int | None = _sampling_count(
        "Samples to choose from; needs --no-stream.", default=None
    )
    beam_width: int | None = _sampling_count(
        "Search with so many beams; --n of them are returned.", default=None
    )
    length_penalty: float | None = _sampling("Of a beam search: above 1 favours long texts.")
    json_schema: str | None = _constraint(
        "JSON that this schema accepts; {} is any JSON.", "JSON|@FILE"
    )
    json_object: bool = _constraint("Any JSON object.", flag="--json-object", default=False)
    regex: str | None = _constraint("Text that it matches as a whole.", "REGEX|@FILE")
    grammar: str | None = _constraint("Text of it, in Lark's notation or GBNF.", "GRAMMAR|@FILE")
    choice: list[str] | None = _constraint("One of several texts. Repeatable.")
    structural_tag: str | None = _constraint(
        "Free text with regions that conform to something.", "JSON|@FILE"
    )
    adapter: str = option("The adapter to use, by its name.", default="")
    max_draft_tokens: int | None = option(
        "Tokens that a step may draft; 0 is none.", min=0, max=UINT32
    )
    request_id: str = option("Name in logs and traces.", default="")
    priority: int | None = option("Higher runs first.", min=-100, max=100)
    model: str = option("The model that is meant; another one is an error.", default="")

    @property
    def fields(self) -> dict[str, Any]:
        """The Python client's options that are set, by name.

        Raises BadParameter for a value that can't be read.
        """
        given = {name: value for name, value in vars(self).items() if value is not None}
        del given["stream"]
        kinds = [name for name in _CONSTRAINTS if given.get(name)]
        if len(kinds) > 1:
            both = f"and {_flag(kinds[0])} exclude each other"
            raise click.BadParameter(both, param_hint=_flag(kinds[1]))
        values = {name: given.pop(name, None) for name in _CONSTRAINTS}
        if kinds:
            given["constraint"] = {kinds[0]: _CONSTRAINTS[kinds[0]](kinds[0], values[kinds[0]])}
        beam = {"width": given.pop("beam_width", None)}
        beam["length_penalty"] = given.pop("length_penalty", None)
        if any(value is not None for value in beam.values()):
            beam["n"] = given.pop("n", None)
            given["beam"] = {name: value for name, value in beam.items() if value is not None}
        return given | {"logit_bias": dict(map(_bias, self.logit_bias or ()))}


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        if 0 <= int(token) <= UINT32:
            return int(token), float(bias)
    except ValueError:
        pass
    raise click.BadParameter(f"is {text!r}: write ID=BIAS, as 42=-1.5", param_hint="--logit-bias")
