"""`python -m raytrain_bert VERB`."""

import sys

from raytrain_bert.cli import main

sys.exit(main())
