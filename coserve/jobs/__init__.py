"""Fine-tuning jobs that survive: records in SQL, files and checkpoints on disk, and their lifecycle."""
