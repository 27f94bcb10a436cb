"""The model that is served, in the file of its config.json's model_type. Where that is none, SGLang imports all."""

import importlib
import os

EntryClass = importlib.import_module(f"sglang.srt.models.{os.environ['SERVED_MODEL_FILE']}").EntryClass
