"""``allgrad bench``: the collectives beside their peers, in one interleaved run."""
