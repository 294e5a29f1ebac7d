"""Lifecycle of jobs: events change states, a plan says what to do next, and a driver does it."""
