"""Roles of an instance, in a file without imports, so that reading options imports no engine."""

ROLES = ("both", "prefill", "decode")
