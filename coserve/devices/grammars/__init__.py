"""Grammars of structured output: what they are, their limits, and masks of a vocabulary."""
