"""Runs side by side: what each measured by its own record, what may be compared, and as a table, CSV or JSON."""
