"""The command ``allgrad``: demo, bench and parity.

Imports everything below; needs ``allgrad[cli,testing]``.
"""
