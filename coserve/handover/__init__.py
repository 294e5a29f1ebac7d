"""Separate prefill and decode: one instance computes prompts for another of the same model, and
hands over their pages.
"""
