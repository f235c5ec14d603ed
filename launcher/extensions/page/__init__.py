"""Comparison of runs: `launch report`."""
