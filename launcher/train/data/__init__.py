"""Samples: their order, the windows they form, and how they reach the step."""
