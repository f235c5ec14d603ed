"""What the files of a run say: its settings, figures and curves, for reports."""
