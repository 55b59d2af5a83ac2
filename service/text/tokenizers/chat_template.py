"""Chat messages to a prompt, by the Jinja template that came with the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenpod.service.calls.chats import ChatPrompt
from tokenpod.service.text.tokenizers.template_values import (
    ChatTemplateError,
    messages_of,
    tools_of,
)

__all__ = ["ChatTemplate", "ChatTemplateError", "roles_of", "takes_tools", "wants_parts"]

MAX_RENDERED_CHARS = 16 * 2**20
MAX_RANGE_STEPS = 1_000_000
#: The key of a message under which templates find who speaks.
_ROLE = "role"
_TOOLS = "tools"
#: What was said, under the same name in messages and variables.
_CONTENT = "content"
#: What templates call; no argument of a request stands for them.
_FUNCTIONS = ("raise_exception", "strftime_now", "namespace", "dict")


class ChatTemplate:
    """A compiled template in Jinja's immutable sandbox, with what templates of models expect.

    `special_tokens` are variables of the template (`bos_token`, `eos_token`, ...).

    ChatTemplateError: `source` isn't a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        self._takes_tools = takes_tools(source)
        self._in_parts = wants_parts(source)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the model's chat template is broken: line {error.lineno}: {error.message}"
            ) from error
        except RecursionError as error:
            raise ChatTemplateError("the model's chat template is nested too deeply") from error

    def render(self, chat: ChatPrompt) -> str:
        """Return the prompt for a conversation.

        A template is code that came with the model: what it can run is bounded by Jinja's
        sandbox, the steps of its `range` loops and the size of its output.

        ChatTemplateError: the template refuses the conversation, or fails; a tool's schema is no
            JSON; an argument has the name of something else.
        """
        if chat.tools and not self._takes_tools:
            raise ChatTemplateError("is of no use: the model's template shows no tools", "tools")
        own: dict[str, Any] = {
            **self._special_tokens,
            "messages": messages_of(chat, in_parts=self._in_parts),
            _TOOLS: tools_of(chat.tools),
            "add_generation_prompt": chat.add_generation_prompt,
            "range": _BoundedRange(),
        }
        for name in chat.arguments:
            if name in own or name in _FUNCTIONS:
                field = f"template_arguments.{name}"
                raise ChatTemplateError("is what the server sets, and can't be replaced", field)
        try:
            return _whole(self._render_bounded({"documents": None, **chat.arguments, **own}))
        except ChatTemplateError:
            raise
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template: {error.message}") from error
        except MemoryError:
            # Its process has a limit, which is not the template's to explain.
            raise
        except Exception as error:
            # Any expression of the template can fail, in any way: none of it is a bug of ours.
            raise ChatTemplateError(
                f"the model's chat template failed: {type(error).__name__}: {error}"
            ) from error

    def _render_bounded(self, variables: dict[str, Any]) -> str:
        parts = []
        size = 0
        for part in self._template.generate(variables):
            parts.append(part)
            size += len(part)
            if size > MAX_RENDERED_CHARS:
                raise ChatTemplateError(
                    f"the model's chat template wrote over {MAX_RENDERED_CHARS} characters"
                )
        return "".join(parts)


def _whole(text: str) -> str:
    """`text` with a mark for each half of a character, which JSON can write and no token has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def takes_tools(source: str) -> bool:
    """Whether a template shows the model its tools. As `roles_of`."""
    try:
        tree = _environment().parse(source)
    except (TemplateSyntaxError, RecursionError):
        return False
    return any(name.name == _TOOLS for name in tree.find_all(nodes.Name))


def wants_parts(source: str) -> bool:
    """Whether a template goes through the parts of a message, and knows no content that is a text.

    Such a one, as LLaVA 1.5's, would go through the text's characters, and write nothing. As
    `roles_of`.
    """
    try:
        tree = _environment().parse(source)
    except (TemplateSyntaxError, RecursionError):
        return False
    if any(test.name == "string" for test in tree.find_all(nodes.Test)):
        return False
    return any(_names_content(each) for loop in tree.find_all(nodes.For) for each in _walked(loop))


def _walked(loop: nodes.For) -> list[nodes.Node]:
    """What a loop goes through, and what that is filtered from."""
    found: list[nodes.Node] = [loop.iter]
    while isinstance(filtered := found[-1], nodes.Filter) and filtered.node is not None:
        found.append(filtered.node)
    return found


def _names_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == _CONTENT
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == _CONTENT
    return isinstance(node, nodes.Name) and node.name == _CONTENT


def roles_of(source: str) -> list[str]:
    """The roles that a template compares messages' with, in alphabetical order.

    Nothing is run or compiled; a template that can't be read names none.
    """
    try:
        tree = _environment().parse(source)
    except (TemplateSyntaxError, RecursionError):
        return []
    found = set[str]()
    for compared in tree.find_all(nodes.Compare):
        sides = [compared.expr, *(operand.expr for operand in compared.ops)]
        if any(_names_role(side) for side in sides):
            texts = [each for side in sides for each in (side, *side.find_all(nodes.Const))]
            found |= {t.value for t in texts if isinstance(t, nodes.Const) and t.value != _ROLE}
    return sorted(role for role in found if isinstance(role, str))


def _names_role(node: nodes.Node) -> bool:
    """Whether an expression is a message's role: `message.role` or `message['role']`."""
    if isinstance(node, nodes.Getattr):
        return node.attr == _ROLE
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Const)
        and node.arg.value == _ROLE
    )


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks for training, plain text for a server."""

    tags = {"generation"}  # noqa: RUF012 - the type that Jinja declares

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedRange:
    """`range` with a budget of steps for one rendering, since loops nest."""

    def __init__(self) -> None:
        self._left = MAX_RANGE_STEPS

    def __call__(self, *bounds: int) -> range:
        steps = range(*bounds)
        # Not len(): that overflows on a range which no budget allows.
        if max(abs(steps.stop - steps.start) // abs(steps.step), 1) > self._left:
            raise ChatTemplateError(
                f"the model's chat template loops over more than {MAX_RANGE_STEPS} steps"
            )
        self._left -= max(len(steps), 1)
        return steps


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as models saw it in training: Jinja's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
