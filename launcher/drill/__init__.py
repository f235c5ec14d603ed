"""`launch drill`: the user's own job, interrupted on purpose, and compared with itself undisturbed."""
