"""Forecast of memory and traffic: windows of the real task on tensors without memory."""
