"""The two sides of a divided device, on which requests and jobs run at once."""
