"""`python -m dynamo_megatron.cli`."""

import sys

from dynamo_megatron.cli import main

sys.exit(main())
