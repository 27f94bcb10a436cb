"""Prompt sources, prompt templates and the resumable prompt stream."""

from dynamo_megatron.data.sources import load_prompts
from dynamo_megatron.data.stream import PromptStream, open_stream
from dynamo_megatron.data.templates import encode_prompt, load_tokenizer

__all__ = ["PromptStream", "encode_prompt", "load_prompts", "load_tokenizer", "open_stream"]
