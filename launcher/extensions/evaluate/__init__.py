"""Evaluation of a run's checkpoint (`launch eval`)."""
