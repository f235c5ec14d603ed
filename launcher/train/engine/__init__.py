"""The optimizer step: micro-batches, window totals, clip, update."""
