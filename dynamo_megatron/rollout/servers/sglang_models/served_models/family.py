"""All that a server imports of SGLang's two hundred files of models (SGLANG_EXTERNAL_MODEL_PACKAGE): that of its
config.json's model_type. Where there is none, SGLang imports all."""

import importlib
import os

EntryClass = importlib.import_module(f"sglang.srt.models.{os.environ['SERVED_MODEL_FILE']}").EntryClass
