"""Ray: actors of nodes, deployments of fronts, and what the commands ask of them."""
