# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Measuring drafters."""
