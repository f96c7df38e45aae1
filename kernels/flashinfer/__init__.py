"""Attention of prompts by FlashInfer, an optional dependency for CUDA devices."""
