"""What the whole suite needs."""

pytest_plugins = ["pytester"]
