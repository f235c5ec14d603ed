"""The control wing: where a run lives. Nothing here imports torch at module level."""
