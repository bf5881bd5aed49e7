# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""`python -m hf_carryover.testbed`."""

import sys

from .command import main


sys.exit(main())
