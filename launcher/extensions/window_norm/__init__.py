"""batch.norm=window: BatchNorm over all samples of a window."""
