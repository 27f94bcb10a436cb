"""Proves a finished step of a run again, from its files, with numpy and transformers in place of the trainer."""
