"""``python -m lab EXPERIMENT [options]``."""

from lab.common.experiments import main

if __name__ == "__main__":
    main()
