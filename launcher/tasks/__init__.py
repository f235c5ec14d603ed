"""Bundled tasks: real data that is on every machine, so that nothing is downloaded."""
