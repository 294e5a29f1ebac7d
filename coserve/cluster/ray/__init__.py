"""Ray: the actors of nodes, the deployment of fronts, and the logic of the commands for both.

Only this folder imports Ray.
"""
