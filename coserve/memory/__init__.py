"""Memory: one pool of pages for KV caches and for what fine-tuning keeps between its forward and
backward pass.
"""
