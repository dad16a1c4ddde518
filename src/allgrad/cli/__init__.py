"""The command ``allgrad``: demo and bench.

Imports everything below; needs ``allgrad[cli,testing]``.
"""
