"""`python -m tokenpod`: the command line."""

import sys

from tokenpod_client.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
