"""Cluster: many nodes: what each reports (NodeView), and which of them gets a request or a job
(Placement).
"""
