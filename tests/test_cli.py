# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""The command `hf-carryover`."""

import importlib
import inspect

import pytest

import hf_carryover
from hf_carryover import cli


def test_usage_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)
    assert cli.main([]) == 2
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == hf_carryover.__version__


def test_unknown_command(capsys):
    assert cli.main(["recrod"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown command 'recrod'")


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_takes_arguments_and_has_help(name, capsys):
    module = importlib.import_module(cli.COMMANDS[name][0])
    assert len(inspect.signature(module.main).parameters) == 1
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "--help"])
    assert stopped.value.code == 0
    assert f"hf-carryover {name}" in capsys.readouterr().out
