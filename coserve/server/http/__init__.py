"""Middleware and helpers of HTTP: addresses, body limits, connections, authentication, answers."""
