"""Conversations of plain turns."""

from __future__ import annotations

from tokenpod.service.calls.chats import ChatMessage, ChatPrompt


def turns(*said: tuple[str, str], add_generation_prompt: bool = True) -> ChatPrompt:
    """Pairs of role and content."""
    return ChatPrompt([ChatMessage(*pair) for pair in said], add_generation_prompt)
