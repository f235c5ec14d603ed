"""Trackers: their processes, which mirror a run's record, and that of Weights & Biases. Imports no torch."""
