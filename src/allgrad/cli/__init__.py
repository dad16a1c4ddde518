"""The command ``allgrad``."""
