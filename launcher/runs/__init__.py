"""Runs after their submission: state, control, changes of a plan."""
