"""The version of allgrad, which every message between ranks carries."""

__version__ = "0.1.0"
