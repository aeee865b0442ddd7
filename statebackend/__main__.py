"""``python -m statebackend`` is the console script ``statebackend``."""

import sys

from statebackend.command_line import main

if __name__ == "__main__":
    sys.exit(main())
