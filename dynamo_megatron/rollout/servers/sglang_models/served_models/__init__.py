"""What a server imports of SGLang's models (SGLANG_EXTERNAL_MODEL_PACKAGE): without it all of them, some two hundred
files."""
