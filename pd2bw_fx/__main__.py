"""python -m pd2bw_fx ..."""

import sys

from pd2bw_fx.cli import main

if __name__ == "__main__":
    sys.exit(main())
