"""``python -m telegrad``: the command ``telegrad``, where its script is not on the path."""

from telegrad.tools.cli import main

if __name__ == "__main__":
    main()
