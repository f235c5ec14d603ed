"""Strategies: DDP, FSDP, HSDP, and what they need."""
