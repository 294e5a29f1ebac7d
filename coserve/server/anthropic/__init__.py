"""Anthropic's /v1/messages in terms of chats."""
