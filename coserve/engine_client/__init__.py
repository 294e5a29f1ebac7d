"""The engine as a server sees it: starts its process, sends commands, and takes every report to
whom it concerns.
"""
