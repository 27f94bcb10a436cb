"""Prompt sources, prompt templates and the resumable prompt stream."""
