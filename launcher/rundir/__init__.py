"""Files of a run: paths, durable writes, fencing, records, the snapshot of the user's code."""
