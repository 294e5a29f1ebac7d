"""Cluster: many nodes behind one front, and the placement of requests and jobs on them."""
