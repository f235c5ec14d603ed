"""A look at a task before a job starts: its model, data and memory."""
