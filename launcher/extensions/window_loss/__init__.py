"""Loss of all samples of a window: a task's ``outputs`` and ``window_loss``."""
