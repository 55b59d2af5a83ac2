"""Where images stand in prompts: in chats, in texts of routers, and as tokens."""

from __future__ import annotations

import base64

import pytest

from support.images.files import file_of, picture
from tokenpod.core.requests import ImageRun
from tokenpod.service.calls.chats import ChatMessage, ChatPrompt, ToolCall
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.images.expansions import Layout
from tokenpod.service.images.image_text import ImageTokens
from tokenpod.service.images.inline import cut_out
from tokenpod.service.text.tokenizers.chat_template import ChatTemplate, wants_parts
from tokenpod.service.text.tokenizers.template_values import ChatTemplateError
from tokenpod.service.text.workers.text_worker import with_images

TOKENS = ImageTokens(9, "<image>", opening="<see>", closing="</see>")
#: As LLaVA 1.5's: images first, and nothing of a content that is no list.
FILTERED = """{% for message in messages %}{{ message['role'].upper() + ': ' -}}
{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}
{%- endfor %}{% for part in message['content'] | selectattr('type', 'equalto', 'text') -%}
{{ part['text'] + ' ' }}{% endfor %}{% endfor %}"""
#: As Qwen2-VL's: a content may be either.
EITHER = """{% for message in messages %}{% if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}
{%- endfor %}{% endif %}{% endfor %}"""
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


def plain(rows: int) -> Layout:
    """Of an image whose rows follow each other."""
    return (("", rows),)


def chat(*messages: ChatMessage) -> ChatPrompt:
    return ChatPrompt(messages)


@pytest.mark.parametrize(
    ("template", "wanted"), [(FILTERED, True), (EITHER, False), (PLAIN, False)]
)
def test_a_template_that_knows_parts_alone_gets_parts(template: str, wanted: bool) -> None:
    assert wants_parts(template) is wanted
    rendered = ChatTemplate(template, {}).render(chat(ChatMessage("user", "hello")))
    assert "hello" in rendered


def test_images_stand_where_the_client_put_them() -> None:
    turns = chat(ChatMessage("user", "ab", images=[0, 1, 2]), ChatMessage("user", "c"))
    rendered = ChatTemplate(EITHER, {}).render(turns)
    assert rendered == "<image>a<image>b<image>c"
    assert with_images(rendered, turns, TOKENS.texts([*map(plain, (1, 2, 3))])) == (
        "<image>a<image><image>b<image><image><image>c"
    )
    filtered = ChatTemplate(FILTERED, {}).render(turns)
    assert filtered == "USER: <image>\n<image>\n<image>\na b USER: c "


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (ChatMessage("user", "a <image>"), "messages[0].content"),
        (ChatMessage("a <image>", ""), "messages[0].role"),
        (ChatMessage("user", "", reasoning="<image>"), "messages[0].reasoning"),
        (ChatMessage("user", "", name="<image>"), "messages[0].name"),
        (
            ChatMessage("user", "", tool_calls=[ToolCall("", "f", '"<image>"')]),
            "messages[0].tool_calls[0].arguments",
        ),
    ],
)
def test_a_text_has_no_token_of_images(message: ChatMessage, field: str) -> None:
    with pytest.raises(ChatTemplateError, match="has '<image>', which stands") as refused:
        with_images("anything", chat(message), TOKENS.texts([]))
    assert refused.value.field == field


def test_what_stands_for_an_image_has_its_own_tokens() -> None:
    """Where the template writes one token, and rows have another, nobody may write either."""
    tokens = ImageTokens(9, "<soft>", "<image>", before="[", behind="]")
    lines = (("", 2), ("|", 2), ("!", 0))
    assert tokens.texts([lines]).expansions == ["[<soft><soft>|<soft><soft>!]"]
    turns = chat(ChatMessage("user", "a", images=[0]))
    assert with_images("<image>", turns, tokens.texts([lines])) == "[<soft><soft>|<soft><soft>!]"
    for token in "<soft>", "<image>":
        with pytest.raises(ChatTemplateError, match=f"has '{token}', which stands"):
            with_images("x", chat(ChatMessage("user", token)), tokens.texts([]))
        with pytest.raises(InvalidArgument, match=f"has '{token}', which stands"):
            tokens.within(token, [], [], "inputs")


def test_a_template_must_have_a_place_for_each_image() -> None:
    turns = chat(ChatMessage("user", "ab", images=[0, 1]))
    with pytest.raises(ChatTemplateError, match="has 1 places for images, of which there are 2"):
        with_images("a <image>", turns, TOKENS.texts([plain(4), plain(4)]))


def test_rows_are_found_in_a_prompt() -> None:
    prompt = [9, 9, 1, 9, 2, 9, 9, 9]
    assert TOKENS.runs(prompt, [3, 1, 2]) == [
        ImageRun(0, 0, 0, 2),
        ImageRun(0, 2, 3, 1),
        ImageRun(1, 0, 5, 1),
        ImageRun(2, 0, 6, 2),
    ]
    with pytest.raises(InvalidArgument, match=r"^truncate leaves 6 of the 7 tokens that stand for"):
        TOKENS.runs(prompt, [3, 1, 3])


def test_inline_images_are_cut_out_of_a_text() -> None:
    data = file_of(picture(4, 4))
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    text = f"see ![]({url}) and ![a cat]({url})? ![](https://example.org/x.png)"
    found = cut_out(text, "inputs")
    assert found.text == "see  and ? ![](https://example.org/x.png)"
    assert ([image.data for image in found.images], found.places) == ([data, data], [4, 9])
    assert TOKENS.within("see  and ?", found.places, [plain(1), plain(2)], "inputs") == (
        "see <see><image></see> and <see><image><image></see>?"
    )
    with pytest.raises(InvalidArgument, match=r"^inputs: image 1 is no base64"):
        cut_out("![](data:image/png;base64,a?b)", "inputs")
    with pytest.raises(InvalidArgument, match=r"^inputs has '<image>', which stands"):
        TOKENS.within("a <image>", [], [], "inputs")
