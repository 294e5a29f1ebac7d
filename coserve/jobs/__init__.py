"""Fine-tuning jobs that survive: records in SQL, records and files of checkpoints, and their
lifecycle.
"""
