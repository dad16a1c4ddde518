"""``python -m allgrad``: the command ``allgrad``."""

import sys


def main() -> None:
    """Run the command, or say which extra brings it."""
    try:
        from allgrad.cli.main import app
    except ModuleNotFoundError as error:
        sys.exit(f"{error}. The command needs its extras: pip install 'allgrad[cli,testing]'")
    app(prog_name="allgrad")


if __name__ == "__main__":
    main()
