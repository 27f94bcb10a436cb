"""Processes and what they share with others: waiting, signals, sockets, files, text of others."""
