"""Inspection of a task before a job starts: its model, data and memory."""
