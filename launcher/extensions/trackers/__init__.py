"""Trackers other than W&B: TensorBoard and MLflow."""
