"""Figures of FlexLLM, LLMStation and HARLI on modelled devices: `python -m experiments.papers`."""
