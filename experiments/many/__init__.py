"""Many jobs of short sequences at once, beside the same jobs otherwise."""
