"""Export of a run's model as safetensors files (`launch export`)."""
