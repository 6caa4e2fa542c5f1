"""Run `python -m bench check`."""

import sys

from bench.check import main

sys.exit(main())
