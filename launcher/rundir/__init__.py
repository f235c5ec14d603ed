"""The files of a run: paths, durable writes, fencing, records, the copy of the user's code."""
