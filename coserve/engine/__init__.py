"""The engine: requests and jobs on one backbone. So far: how a request's next token is chosen."""
