"""Processes, signals, sockets, files, and text and JSON that others wrote."""
