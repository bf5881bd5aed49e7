# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Measurements: see README.md in this folder."""
