"""Fine-tuning jobs of an engine: what is true of each, the memory that it has, and what moves it on."""
