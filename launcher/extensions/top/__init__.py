"""Live view of all runs: `launch top`."""
