"""Outer steps: sites train on their own, and average their progress now and then (DiLoCo)."""
