"""Adapters: PEFT methods as bypasses, one file per method, and PEFT's directory format."""

from coserve.adapters.base import Adapter, AdapterConfig
from coserve.adapters.methods.lora import LoraConfig
from coserve.adapters.peft_directory import load_adapter, save_adapter

__all__ = ["Adapter", "AdapterConfig", "LoraConfig", "load_adapter", "save_adapter"]
