"""What the whole suite needs."""

import os

pytest_plugins = ["pytester"]

# A graph that Inductor kept from an earlier run has the gradients that the ops had then.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
