"""What each command checks and opens, and the folder that it writes to."""
