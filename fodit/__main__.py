"""`python -m fodit` is the `fodit` command, also under torchrun."""

import sys

from fodit.cli import main

sys.exit(main())
