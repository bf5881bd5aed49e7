# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Registration with the Auto classes, without `import hf_carryover` paying for torch.

What transformers has loaded already is served at once. For the rest a finder waits: it loads modules of transformers
as usual, and registers after the outermost of them is complete. Not earlier: the Auto classes are imported from the
middle of other modules (`modeling_layers`, `generation.utils`, ...) that our own model needs complete.
"""

import importlib.abc
import sys


_HOST = "transformers."
_CONFIGS = f"{_HOST}models.auto.configuration_auto"
_MODELS = f"{_HOST}models.auto.modeling_auto"
_OURS = f"{__package__}.modeling_carryover"  # whoever imports it first may be the one who loads the Auto classes

_loading: set[str] = set()
_registered: set[str] = set()


def _register_what_is_ready() -> None:
    if _loading:
        return
    # exist_ok: reloading the package, in a notebook for example, registers new classes of the same names.
    if _CONFIGS in sys.modules and _CONFIGS not in _registered:
        from transformers import AutoConfig

        from .configuration_carryover import CarryoverConfig

        AutoConfig.register(CarryoverConfig.model_type, CarryoverConfig, exist_ok=True)
        _registered.add(_CONFIGS)
    if _MODELS in sys.modules and _MODELS not in _registered:
        from transformers import AutoModel

        from .modeling_carryover import CarryoverDrafter

        AutoModel.register(CarryoverDrafter.config_class, CarryoverDrafter, exist_ok=True)
        _registered.add(_MODELS)


class _RegisteringLoader(importlib.abc.Loader):
    """Loads one module with its own loader, then registers."""

    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name: str):
        return getattr(self.loader, name)

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module) -> None:
        name = module.__spec__.name
        # The module itself never sees this loader.
        module.__spec__.loader = module.__loader__ = self.loader
        _loading.add(name)
        try:
            self.loader.exec_module(module)
        finally:
            _loading.discard(name)
        _register_what_is_ready()
        if _MODELS in _registered:
            _stop_waiting()


class _RegisteringFinder(importlib.abc.MetaPathFinder):
    """Asks the other finders for modules of transformers, and for our model."""

    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith(_HOST) and fullname != _OURS:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _RegisteringLoader(spec.loader)
                return spec
        return None


def _stop_waiting() -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _RegisteringFinder)]


def register_auto_classes() -> None:
    """Register with `AutoConfig` and `AutoModel`: now where they are loaded, otherwise as soon as they are."""
    _stop_waiting()
    _registered.clear()
    sys.meta_path.insert(0, _RegisteringFinder())
    _register_what_is_ready()
    if _MODELS in _registered:
        _stop_waiting()


__all__ = ["register_auto_classes"]
