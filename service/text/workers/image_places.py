"""Images in a rendered chat: what stands for each takes the place of the token for it."""

from __future__ import annotations

from tokenpod.service.calls.chats import ChatPrompt
from tokenpod.service.images.expansions import ImageTexts
from tokenpod.service.text.tokenizers.template_values import ChatTemplateError


def with_images(rendered: str, chat: ChatPrompt, images: ImageTexts) -> str:
    """A rendered chat with the tokens that stand for its images.

    Raises ChatTemplateError if a text of the chat has the token itself (CVE-2026-44222), or if the
    template does not write one for each image.
    """
    for at, message in enumerate(chat.messages):
        for name in ("content", "reasoning", "role", "name"):
            _check(getattr(message, name), f"messages[{at}].{name}", images)
        for number, call in enumerate(message.tool_calls):
            _check(call.arguments, f"messages[{at}].tool_calls[{number}].arguments", images)
            _check(call.name, f"messages[{at}].tool_calls[{number}].name", images)
    pieces = rendered.split(images.token)
    places, count = len(pieces) - 1, len(images.expansions)
    if places != count:
        raise ChatTemplateError(
            f"the model's chat template has {places} places for images, of which there are {count}"
        )
    parts = [pieces[0]]
    for expansion, piece in zip(images.expansions, pieces[1:], strict=True):
        parts += [expansion, piece]
    return "".join(parts)


def _check(text: str, field: str, images: ImageTexts) -> None:
    if problem := images.forbidden(text):
        raise ChatTemplateError(problem, field)
