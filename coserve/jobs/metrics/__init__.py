"""Metrics of jobs: result files and experiment trackers."""
