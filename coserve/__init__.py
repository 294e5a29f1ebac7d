"""coserve: serve a language model and fine-tune it at the same time, from one copy of the weights.

Importing this package is cheap: torch, transformers and the rest are imported by the modules that use them.
"""

__version__ = "0.1.0"
