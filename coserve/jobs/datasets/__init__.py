"""Training files of jobs: how they are read, checked and shown."""
