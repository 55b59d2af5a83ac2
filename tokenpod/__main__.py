"""`python -m tokenpod`: the command line."""

import sys

from tokenpod.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
