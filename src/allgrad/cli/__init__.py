"""The command ``allgrad``: demo, bench and report.

Imports everything below; needs ``allgrad[cli,testing]``.
"""
