"""Trackers: the processes that mirror a run's record, and the tracker of Weights & Biases. Imports no torch."""
