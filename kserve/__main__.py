"""python -m kserve"""

import sys

from kserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
