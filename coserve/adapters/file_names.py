"""The files of an adapter's directory, by name."""

# PEFT's.
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# Beside the files of a model that full fine-tuning has made: what was trained. No file of PEFT's,
# which would make transformers look for an adapter.
FULL_FILE = "coserve_full.json"
