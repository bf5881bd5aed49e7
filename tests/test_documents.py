# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""What the documents beside the package say is so."""

import re
from pathlib import Path

import pytest
import yaml

import hf_carryover


ROOT = Path(__file__).parents[1]


def table() -> list[tuple[str, list[str]]]:
    """Reported failures, and the files that are said to try them."""
    lines = (ROOT / "tests" / "README.md").read_text().splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| R")]
    return [(row[1].strip(), re.findall(r"`(test_\w+\.py)`", row[3])) for row in rows]


@pytest.mark.parametrize(("case", "files"), table(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_reported_failure_is_tried(case, files):
    assert files
    for name in files:
        assert re.search(rf"\b{case}\b", (ROOT / "tests" / name).read_text()), f"{name} does not name {case}"


def test_every_case_that_is_named_is_listed():
    named = {
        case
        for path in (ROOT / "tests").glob("test_*.py")
        if path.name != Path(__file__).name
        for case in re.findall(r"\bR[1-9]\d?\b", path.read_text())
    }
    assert named <= {case for case, _ in table()}


def test_versions_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == hf_carryover.__version__
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert f"## [{hf_carryover.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_package_is_typed():
    assert (ROOT / "hf_carryover" / "py.typed").exists()
    assert '"py.typed"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "tests/README.md"])
def test_links_and_make_targets_exist(name):
    path = ROOT / name
    text = path.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("http") or (path.parent / link).exists(), link
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    commands = re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", text, flags=re.MULTILINE)
    assert {first or second for first, second in commands} <= targets


def test_scheduled_jobs_run_what_is_there():
    """Both providers run the one script."""
    github = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())
    steps = github["jobs"]["nightly"]["steps"]
    assert ".ci/nightly" in [step.get("run") for step in steps]
    assert github[True]["schedule"]  # YAML 1.1 reads `on` so
    gitlab = yaml.safe_load((ROOT / ".ci" / "nightly.gitlab-ci.yml").read_text())
    assert gitlab["nightly"]["script"] == [".ci/nightly"]
    script = ROOT / ".ci" / "nightly"
    assert script.stat().st_mode & 0o111
