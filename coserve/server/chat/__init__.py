"""Chats: prompts, tools, reasoning, and answers of /v1/chat/completions."""
