"""Settings, figures and curves of a run, read from its files for reports."""
