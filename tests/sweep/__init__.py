"""Tests of launcher/sweeps."""
