"""``allgrad doctor``: whether this machine, and this job, are set up so that collectives work.

Facts of each rank, rules over them, then connections, a world and its collectives. Imports
``collectives``, ``testing`` and ``_wire``.
"""
