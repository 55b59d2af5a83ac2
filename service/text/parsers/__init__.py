"""What a model writes in a chat, told apart: text, reasoning and calls of tools."""
