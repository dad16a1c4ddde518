"""The command ``allgrad``: demo, bench and doctor.

Imports everything below; needs ``allgrad[cli,testing]``.
"""
