"""What an instance may be; here, so that reading options does not import an engine."""

ROLES = ("both", "prefill", "decode")
