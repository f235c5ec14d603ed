"""Measurements of a training run: communication, noise scale, stragglers, FLOPs."""
