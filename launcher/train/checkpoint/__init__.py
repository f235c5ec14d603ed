"""Checkpoints: written, read back, compared."""
