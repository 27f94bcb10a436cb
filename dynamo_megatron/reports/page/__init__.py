"""The report as one HTML file: what it shows of a run's files (data, pure but for reading), and its rendering."""
