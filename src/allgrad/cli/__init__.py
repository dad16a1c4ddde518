"""The command ``allgrad``: demo, bench, doctor, parity and report.

Imports ``report``, ``testing``, ``losses``, ``collectives``, ``_wire``, ``_core`` and ``errors``; needs
what ``allgrad[cli,testing]`` brings.
"""
