"""Reports on runs: terminal tables, live display, comparison, HTML page. Imports no torch."""
