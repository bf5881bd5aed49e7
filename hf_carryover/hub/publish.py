# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""
Publishing a drafter: one commit, of everything or of nothing.

The files are put together in a folder first. Large files are uploaded before the commit, where nobody sees them; the
commit that names them all is one request, and the server carries it out as a whole. Its answer may be lost, so before
it is sent again the repository is asked whether it holds these very files already.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    hf_hub_download,
    metadata_load,
)
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile

from ..adapters import CONFIG_FILE as ADAPTER_FILE
from ..adapters import has_adapter
from ..convert.formats import detect_format
from ..modeling_carryover import CarryoverDrafter
from .card import finite, hub_id_of, is_edited, model_card, stamp
from .results import read_report
from .retry import with_retries
from .run import Run


logger = logging.getLogger(__name__)

# What a push owns in a repository: of these, what the new drafter does not have is removed with the same commit.
_OWNED = ("*.safetensors", "*.safetensors.index.json", "config.json", ADAPTER_FILE)


@dataclass
class _Remote:
    """What the repository is before the push."""

    api: HfApi
    repo_id: str
    revision: str
    head: str | None = None
    paths: set[str] = field(default_factory=set)


def push_to_hub(
    drafter_or_trainer,
    repo_id: str,
    *,
    report: dict | str | Path | None = None,
    runs: Mapping[str, Run | str | Path] | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    force: bool = False,
    token: str | None = None,
    commit_message: str | None = None,
    base_model: str | None = None,
    card: str | None = None,
    **card_arguments: Any,
) -> CommitInfo:
    """
    Publish a drafter: weights, config, remote-code files, card, training records, report and figures, in one commit.

    Args:
        drafter_or_trainer ([`CarryoverDrafter`] or [`CarryoverTrainer`]): What to publish.
        repo_id (`str`): `"user/name"`; created where it does not exist.
        report (`dict`, `str` or `Path`, *optional*):
            Report of `hf-carryover bench`: a dictionary, a JSON file, or a folder with one and its figures.
        runs (`dict[str, Run | str | Path]`, *optional*):
            Training runs by stage, or their folders; the drafter's own last. A trainer's own run is added.
        private (`bool`, *optional*): Of a new repository.
        revision (`str`, *optional*): Branch to commit to, `"main"` by default; created where it does not exist.
        create_pr (`bool`, *optional*, defaults to `False`): Open a pull request instead of committing to the branch.
        force (`bool`, *optional*, defaults to `False`):
            Push into a repository that holds another model, and over an edited card.
        token (`str`, *optional*): The stored one by default.
        commit_message (`str`, *optional*): Title of the commit.
        base_model (`str`, *optional*): Hub id of the target. A trainer's target names itself.
        card (`str`, *optional*):
            A finished card instead of a generated one. A generated card does not replace one that somebody edited,
            unless `force`.
        card_arguments: Of [`model_card`]: `license`, `language`, `datasets`, `data`, `limits`, `system`.

    Returns:
        `huggingface_hub.CommitInfo`

    Raises:
        ValueError: If the repository holds another model, or report and card are not valid.
        huggingface_hub.errors.HfHubHTTPError: If the Hub refuses, or does not answer after several attempts. The
            repository is then as it was.
    """
    drafter, runs = _unpack(drafter_or_trainer, runs)
    base_model = base_model or _name_of_target(drafter_or_trainer)
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory(prefix="hf_carryover-push-") as scratch:
        folder = Path(scratch)
        drafter.save_pretrained(folder)
        content, files = read_report(report)
        if content is not None:
            (folder / "report.json").write_text(json.dumps(finite(content), indent=1) + "\n", encoding="utf-8")
        for file in files:
            if file.suffix != ".json":
                shutil.copyfile(file, folder / file.name)
        _write_records(folder, runs)
        replace_card = force or card is not None
        if card is None:
            card = str(
                model_card(drafter, repo_id, base_model=base_model, runs=runs, report=content, **card_arguments)
            )
        remote = _open_repository(api, repo_id, revision or "main", private, create_pr)
        if not force:
            _check_same_model(remote, drafter, base_model)
        if replace_card or not _keeps_its_card(remote):
            (folder / "README.md").write_text(stamp(card), encoding="utf-8")
        message = commit_message or f"{'Carryover' if drafter.config.carry else 'Plain'} drafter"
        return _commit(remote, folder, message, create_pr)


def _unpack(source, runs) -> tuple[CarryoverDrafter, dict[str, Run]]:
    """The drafter, and its runs as objects."""
    loaded = {name: run if isinstance(run, Run) else Run.read(run) for name, run in (runs or {}).items()}
    if isinstance(source, CarryoverDrafter):
        return source, loaded
    drafter = getattr(source, "drafter", None)
    if not isinstance(drafter, CarryoverDrafter):
        raise TypeError(f"Expected a CarryoverDrafter or a CarryoverTrainer, got {type(source).__name__}.")
    name = source.args.stage
    if name == "carryover" and not drafter.config.carry:
        name = "control"
    loaded.setdefault(name, Run.of_trainer(source))
    return drafter, loaded


def _name_of_target(source) -> str | None:
    """The Hub id under which a trainer's target was loaded; a local folder is nobody else's name for it."""
    target = getattr(getattr(source, "target", None), "model", None)
    return hub_id_of(getattr(getattr(target, "config", None), "_name_or_path", None))


def _write_records(folder: Path, runs: dict[str, Run]) -> None:
    """`training.json` and its log for the drafter's own run, and one of each, with its name in front, for others."""
    for i, (name, run) in enumerate(runs.items()):
        prefix = "" if i == len(runs) - 1 else f"{name}_"
        record = json.dumps(finite(run.record), indent=2, default=str)
        (folder / f"{prefix}training.json").write_text(record + "\n", encoding="utf-8")
        lines = "\n".join(json.dumps(finite(entry), default=str) for entry in run.log)
        (folder / f"{prefix}training_log.jsonl").write_text(lines + "\n", encoding="utf-8")


# The repository


def _open_repository(api: HfApi, repo_id: str, revision: str, private: bool | None, create_pr: bool) -> _Remote:
    """The repository and its branch, created where they do not exist."""
    remote = _Remote(api, repo_id, revision)
    try:
        _look(remote)
    except RepositoryNotFoundError:
        # Not found is also what a private repository answers to a wrong token: then creating it fails.
        with_retries(lambda: api.create_repo(repo_id, private=private, exist_ok=True), "Creating the repository")
        _open_branch(remote, create_pr)
    except RevisionNotFoundError:
        _open_branch(remote, create_pr)
    return remote


def _open_branch(remote: _Remote, create_pr: bool) -> None:
    if remote.revision != "main":
        if create_pr:
            raise ValueError(f"A pull request goes to 'main'; `revision` is {remote.revision!r}.")
        create = remote.api.create_branch
        with_retries(lambda: create(remote.repo_id, branch=remote.revision, exist_ok=True), "Creating the branch")
    _look(remote)


def _look(remote: _Remote) -> None:
    """Read head and paths of the branch."""
    info = with_retries(
        lambda: remote.api.model_info(remote.repo_id, revision=remote.revision), "Reading the repository"
    )
    remote.head = info.sha
    remote.paths = {sibling.rfilename for sibling in info.siblings or []}


def _check_same_model(remote: _Remote, drafter: CarryoverDrafter, base_model: str | None) -> None:
    """Refuse to push over what is no drafter, or one for another target, and over another drafter's adapter."""
    if has_adapter(drafter) or ADAPTER_FILE in remote.paths:
        _check_same_adapter(remote, drafter)
        return
    if "config.json" not in remote.paths:
        weights = sorted(path for path in remote.paths if path.endswith((".safetensors", ".bin", ".gguf")))
        if weights:
            raise ValueError(f"{remote.repo_id} holds {weights[0]} and no drafter. Choose another name, or `force`.")
        return
    try:
        theirs = json.loads(_fetch(remote, "config.json").read_text(encoding="utf-8"))
        kind = detect_format(theirs)
    except (ValueError, EntryNotFoundError) as error:
        raise ValueError(
            f"{remote.repo_id} holds another model, not a drafter ({error}). Choose another name, or `force`."
        ) from error
    ours = drafter.config
    width = theirs.get("target_hidden_size") or theirs.get("hidden_size")
    found = (theirs.get("vocab_size"), width, theirs.get("num_target_layers"))
    expected = (ours.vocab_size, ours.target_hidden_size, ours.num_target_layers)
    if kind != "carryover" or found != expected:
        raise ValueError(
            f"{remote.repo_id} holds a drafter for another target: {kind}, vocabulary, width and depth {found}; this "
            f"one is for {expected}. Choose another name, or `force`."
        )
    named = _base_model_of(remote)
    if base_model is not None and named is not None and named != base_model:
        raise ValueError(
            f"{remote.repo_id} holds a drafter for {named}, this one is for {base_model}. Choose another name, or "
            "`force`."
        )


def _keeps_its_card(remote: _Remote) -> bool:
    """Whether the repository has a card that somebody edited; says so."""
    if "README.md" not in remote.paths or not is_edited(_fetch(remote, "README.md").read_text(encoding="utf-8")):
        return False
    logger.warning(
        f"The card of {remote.repo_id} was edited and is kept, with the numbers in it: this push does not change "
        "README.md. Pass `card=...`, or `force=True` to replace it by a new one."
    )
    return True


def _check_same_adapter(remote: _Remote, drafter: CarryoverDrafter) -> None:
    """Refuse an adapter where a drafter is, a drafter where an adapter is, and an adapter of another base."""
    holds = {"config.json", ADAPTER_FILE} & remote.paths
    if not holds:
        return
    if not has_adapter(drafter) or ADAPTER_FILE not in holds:
        kinds = ("an adapter", "a drafter") if ADAPTER_FILE in holds else ("another model", "an adapter")
        raise ValueError(f"{remote.repo_id} holds {kinds[0]}, this is {kinds[1]}. Choose another name, or `force`.")
    named = json.loads(_fetch(remote, ADAPTER_FILE).read_text(encoding="utf-8")).get("base_model_name_or_path")
    ours = drafter.adapter_base["base"] or None
    if named != ours:
        raise ValueError(
            f"{remote.repo_id} holds an adapter of {named}, this one is of {ours}. Choose another name, or `force`."
        )


def _fetch(remote: _Remote, name: str) -> Path:
    """A file of the repository as it was before the push."""
    arguments: dict[str, Any] = {"revision": remote.head, "token": remote.api.token, "endpoint": remote.api.endpoint}
    return Path(with_retries(lambda: hf_hub_download(remote.repo_id, name, **arguments), f"Reading {name}"))


def _base_model_of(remote: _Remote) -> str | None:
    """What the card in the repository names as its base model."""
    if "README.md" not in remote.paths:
        return None
    named = (metadata_load(_fetch(remote, "README.md")) or {}).get("base_model")
    return named[0] if isinstance(named, list) and named else named


def _commit(remote: _Remote, folder: Path, message: str, create_pr: bool) -> CommitInfo:
    """The one commit."""
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    stale = {path for path in remote.paths if any(Path(path).match(pattern) for pattern in _OWNED)} - set(paths)
    before = set() if not create_pr else _pull_requests(remote)

    def send() -> CommitInfo:
        # New objects for every attempt: an operation remembers what was done with it.
        operations: list = [CommitOperationAdd(path, folder / path) for path in paths]
        operations += [CommitOperationDelete(path) for path in sorted(stale)]
        return remote.api.create_commit(
            remote.repo_id,
            operations,
            commit_message=message,
            revision=remote.revision,
            create_pr=create_pr,
            parent_commit=None if create_pr else remote.head,
        )

    def done() -> CommitInfo | None:
        refs = sorted(_pull_requests(remote) - before) if create_pr else [remote.revision]
        for ref in refs:
            oid = _holds(remote, ref, folder, paths, stale)
            if oid is not None:
                url = f"{remote.api.endpoint}/{remote.repo_id}"
                number = ref.rsplit("/", 1)[-1]
                pull_request = f"{url}/discussions/{number}" if create_pr else None
                return CommitInfo(
                    commit_url=f"{url}/commit/{oid}",
                    commit_message=message,
                    commit_description="",
                    oid=oid,
                    pr_url=pull_request,
                    _endpoint=remote.api.endpoint,
                )
        return None

    try:
        return with_retries(send, "The commit", done)
    except HfHubHTTPError as error:
        if getattr(error.response, "status_code", None) == 412:
            raise ValueError(
                f"{remote.repo_id} was changed by somebody else during the push; nothing was committed. Push again."
            ) from error
        raise


def _pull_requests(remote: _Remote) -> set[str]:
    refs = with_retries(
        lambda: remote.api.list_repo_refs(remote.repo_id, include_pull_requests=True), "Reading the pull requests"
    )
    return {ref.ref for ref in refs.pull_requests or []}


def _holds(remote: _Remote, ref: str, folder: Path, paths: list[str], stale: set[str]) -> str | None:
    """The commit of `ref` if its files are these and nothing stale, else `None`."""
    api = remote.api
    oid = with_retries(lambda: api.model_info(remote.repo_id, revision=ref), "Reading the repository").sha
    tree = with_retries(
        lambda: list(api.list_repo_tree(remote.repo_id, recursive=True, revision=oid)), "Reading the files"
    )
    theirs = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
    if stale & set(theirs) or not set(paths) <= set(theirs):
        return None
    for path in paths:
        content, entry = (folder / path).read_bytes(), theirs[path]
        if entry.lfs is not None:
            equal = entry.lfs.sha256 == hashlib.sha256(content).hexdigest()
        else:
            equal = entry.blob_id == hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        if not equal:
            return None
    return oid


__all__ = ["push_to_hub"]
