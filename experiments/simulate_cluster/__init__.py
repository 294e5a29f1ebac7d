"""A day of traffic on a thousand modelled devices."""
