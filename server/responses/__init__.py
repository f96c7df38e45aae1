"""OpenAI's Responses API, without a store: the same generation as a chat, in other words."""
