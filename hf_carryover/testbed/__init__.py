# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""A generated language in which the reason why carry pays can be dialled, and the experiment on it."""
