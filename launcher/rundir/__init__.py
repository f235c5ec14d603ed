"""Files of a run: paths, durable writes, fencing, history, the snapshot of the user's code."""
