"""Losses in compiled graphs: each is one op, or a graph break where no op can stand.

Inside ``losses`` it imports the public losses.
"""
