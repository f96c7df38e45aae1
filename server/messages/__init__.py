"""Anthropic's Messages API: the same generation as a chat, in other words."""
