"""The report as one HTML file: the data that it shows, read from a run's files, and its rendering."""
