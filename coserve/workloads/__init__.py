"""Workloads for servers: arrivals and lengths of requests, their senders, and data to learn
from.
"""
