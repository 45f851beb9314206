"""``python -m flashnext`` is the command line."""

import sys

from flashnext.cli import main

if __name__ == "__main__":
    sys.exit(main())
