# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Public drafters in and out: z-lab DFlash, DeepSpec DFlash and DSpark, speculators `dflash` and `dspark`.

[`CarryoverDrafter.from_pretrained`] reads all of them directly. Names of tensors are the same everywhere; what differs
is the layout of a block, how layers are counted, whose embedding and head are used, and where a config says so.
"""

from .convert import FORMATS, Conversion, convert_drafter, read_drafter, write_drafter
from .formats import detect_format


__all__ = ["FORMATS", "Conversion", "convert_drafter", "detect_format", "read_drafter", "write_drafter"]
