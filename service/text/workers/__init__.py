"""Processes that tokenise long texts and render chats, bounded in time and memory."""
