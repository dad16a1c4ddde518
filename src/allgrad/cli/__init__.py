"""The command ``allgrad``: demo, bench, doctor, parity and report.

Imports everything below; needs ``allgrad[cli,testing]``.
"""
