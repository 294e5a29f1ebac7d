"""What coserve is compared with."""
