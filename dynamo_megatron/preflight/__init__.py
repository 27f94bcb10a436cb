"""The checks before a run. Each is a small function; `train` calls the cheap ones, too."""
