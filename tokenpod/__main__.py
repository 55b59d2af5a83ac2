"""`python -m tokenpod`: the command line."""

import sys

from tokenpod.service.cli import main

if __name__ == "__main__":
    sys.exit(main())
