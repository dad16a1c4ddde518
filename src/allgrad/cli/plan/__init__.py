"""``allgrad plan``: what calls and a step of a loss would cost in a world that is not here.

Imports ``_wire`` (costs, link model), ``losses``; command, clip_step, show.
"""
