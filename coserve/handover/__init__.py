"""Prefill and decode apart: one instance computes prompts for another of the same model, and hands
over their pages.
"""
