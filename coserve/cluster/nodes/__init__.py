"""Nodes of a cluster: the process of a node, and what the front knows of each."""
