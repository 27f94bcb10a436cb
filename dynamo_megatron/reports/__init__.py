"""Reads finished runs: reports, comparisons, samples."""
