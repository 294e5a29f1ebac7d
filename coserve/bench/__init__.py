"""Experiments: what coserve reaches on this machine, beside what others reach, measured in the same
run.
"""
