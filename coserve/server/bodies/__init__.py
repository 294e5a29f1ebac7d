"""Bodies that clients send: their schemas, and fields and faults in them."""
