"""What is read of runs: reports, comparisons, samples."""
