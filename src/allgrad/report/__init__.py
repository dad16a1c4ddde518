"""A recording becomes text, a page and a trace: load, clocks, matching, findings, then what shows them.

Imports ``_wire`` and ``errors``; text needs rich, which ``allgrad[cli]`` brings.
"""
