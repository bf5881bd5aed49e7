# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Builds the API documentation from the docstrings: `python .ci/docs.py FOLDER`. Any warning is an error, and so is a
reference ``[`Name`]`` in a docstring to a name of ours that does not exist.
"""

import importlib
import inspect
import pkgutil
import re
import sys
import warnings
from pathlib import Path

import pdoc


PACKAGE = "hf_carryover"
# Imported by their hosts alone, which need not be installed where the documentation is built.
LEFT_OUT = (f"{PACKAGE}.vllm",)
# Annotations of fields that our configuration inherits name things that are not imported where pdoc looks for them.
NOT_OURS = (
    r"(?s)Error parsing type annotation .* for hf_carryover\.(\w+\.)*Carryover(Config|TrainingArguments)\.__init__"
)
# References to other packages: their documentation is theirs.
REFERENCE = re.compile(r"\[`(~?)([A-Za-z_][\w.]*)`\]")


def modules() -> list[str]:
    """Every module of the package that is documented."""
    package = importlib.import_module(PACKAGE)
    names = [name for _, name, _ in pkgutil.walk_packages(package.__path__, f"{PACKAGE}.")]
    return [PACKAGE, *(name for name in names if not name.startswith(LEFT_OUT) and not name.endswith("__main__"))]


def names_of(module) -> set[str]:
    """What a reference may name: public names, also with their class or module before them."""
    names = {*vars(module), *getattr(module, "__all__", ()), module.__name__}
    for name, value in vars(module).items():
        if inspect.isclass(value):
            names |= {f"{name}.{attribute}" for attribute in dir(value)}
            names |= {f"{name}.{field}" for field in getattr(value, "__annotations__", {})}
    return names | {f"{module.__name__}.{name}" for name in names}


def broken_references(loaded: list) -> list[str]:
    """References in docstrings and comments of our source to names that are nowhere."""
    known = set().union(*map(names_of, loaded))
    hosts = {"transformers", "torch", "datasets", "peft", "accelerate", "vllm"}
    broken = []
    for module in loaded:
        for host, name in REFERENCE.findall(Path(module.__file__).read_text(encoding="utf-8")):
            if name.split(".")[0] in hosts or (host and name not in known and not name.startswith(PACKAGE)):
                continue
            if name not in known:
                broken.append(f"{module.__name__}: [`{name}`]")
    return broken


def main(folder: str) -> int:
    warnings.simplefilter("error")
    # Of other packages while they are imported.
    warnings.filterwarnings("default", category=DeprecationWarning)
    warnings.filterwarnings("default", category=FutureWarning)
    warnings.filterwarnings("ignore", message=NOT_OURS)
    names = modules()
    loaded = [importlib.import_module(name) for name in names]
    broken = broken_references(loaded)
    undocumented = [name for name in loaded[0].__all__ if not inspect.getdoc(getattr(loaded[0], name, None))]
    for problem in [*broken, *(f"{PACKAGE}.{name} has no docstring" for name in undocumented)]:
        print(f"error: {problem}", file=sys.stderr)
    if broken or undocumented:
        return 1
    pdoc.render.configure(docformat="google", math=False, footer_text=f"{PACKAGE} {loaded[0].__version__}")
    pdoc.pdoc(PACKAGE, *(f"!{name}" for name in LEFT_OUT), "!.*__main__", output_directory=Path(folder))
    print(f"{len(names)} modules in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "build/docs"))
