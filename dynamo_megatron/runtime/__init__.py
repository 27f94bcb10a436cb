"""Processes, signals, sockets, files, and text and JSON from outside sources."""
