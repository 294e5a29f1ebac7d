"""Fine-tuning jobs as clients create and see them."""
