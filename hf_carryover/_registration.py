# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Registration with the Auto classes, without `import hf_carryover` paying for torch.

Modules of transformers that are loaded already are served at once. For the others an import hook waits: it loads each
of three modules as usual and then registers what can be registered.
"""

import importlib.abc
import importlib.machinery
import sys

_CONFIGS = "transformers.models.auto.configuration_auto"
_MODELS = "transformers.models.auto.modeling_auto"
_MODELING = "transformers.modeling_utils"  # our model needs it; it may be half loaded while it imports `_MODELS`

_loading: set[str] = set()


def _ready(name: str) -> bool:
    return name in sys.modules and name not in _loading


def _register_what_is_ready() -> None:
    if _ready(_CONFIGS):
        from transformers import AutoConfig

        from .configuration_carryover import CarryoverConfig

        # exist_ok: reloading the package, in a notebook for example, registers new classes of the same names.
        AutoConfig.register(CarryoverConfig.model_type, CarryoverConfig, exist_ok=True)
    ours = f"{__package__}.modeling_carryover"
    if _ready(_CONFIGS) and _ready(_MODELS) and _MODELING not in _loading and ours not in _loading:
        from transformers import AutoModel

        _loading.add(ours)  # importing it may load the third module, and come back here
        try:
            from .modeling_carryover import CarryoverDrafter
        finally:
            _loading.discard(ours)
        AutoModel.register(CarryoverDrafter.config_class, CarryoverDrafter, exist_ok=True)


class _RegisteringFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the three modules with the ordinary finder, and registers after each has been executed."""

    def __init__(self, names):
        self.names = set(names)
        self.loaders: dict = {}

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in self.names:
            return None
        self.names.discard(fullname)
        if not self.names:
            sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None:
            self.loaders[fullname], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loaders[spec.name].create_module(spec)

    def exec_module(self, module):
        loader = self.loaders.pop(module.__name__)
        module.__spec__.loader = module.__loader__ = loader
        _loading.add(module.__name__)
        try:
            loader.exec_module(module)
        finally:
            _loading.discard(module.__name__)
        _register_what_is_ready()


def register_auto_classes() -> None:
    """Register with `AutoConfig` and `AutoModel`: now where they are loaded, otherwise as soon as they are."""
    waiting = [name for name in (_CONFIGS, _MODELS, _MODELING) if name not in sys.modules]
    _register_what_is_ready()
    waiting = [name for name in waiting if name not in sys.modules]
    if waiting and not any(isinstance(finder, _RegisteringFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisteringFinder(waiting))


__all__ = ["register_auto_classes"]
