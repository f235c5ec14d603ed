"""Runs read back: tables, the live line, the W&B mirror. No torch, and neither wing is imported."""
