"""Reports on runs: terminal tables, live display, comparison, HTML page, W&B mirror. Imports no torch."""
