"""What is checked before a run: each check a small function, the cheap ones called by `train` itself too."""
