# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Publishing to a Hub on localhost, with the real client: what arrives, and what is left when something goes wrong."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from conftest import tiny_drafter
from fresh_process import python
from hub_server import READ_ONLY, TOKEN, Fault, HubServer, Repo, on_line
from huggingface_hub import ModelCard, ModelCardData, metadata_load
from huggingface_hub.errors import HfHubHTTPError
from tiny_targets import assisted, plain, prompt_ids
from training_helpers import make_trainer, random_rows
from transformers import AutoModel

import hf_carryover
from hf_carryover import CarryoverDrafter, model_card, push_to_hub
from hf_carryover.adapters import add_adapter
from hf_carryover.hub import Run
from hf_carryover.hub.card import TEMPLATE
from hf_carryover.hub.retry import ATTEMPTS


NAME = "user/drafter"
BASE = "user/target"
CARDS = Path(__file__).parents[1] / "model_cards"
REPORT = Path(__file__).parents[1] / "bench" / "results" / "smollm2-bench.json"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with HubServer() as server, on_line(server, monkeypatch, tmp_path / "cache"):
        yield server


@pytest.fixture
def drafter(target):
    return tiny_drafter(target, markov_rank=4)


def other(target, seed=7):
    """Another drafter for the same target."""
    return tiny_drafter(target, seed=seed, markov_rank=4)


def push(drafter, **kwargs):
    return push_to_hub(drafter, NAME, **{"token": TOKEN, "base_model": BASE, **kwargs})


def equal_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    return set(a) == set(b) and all(torch.equal(a[key], b[key]) for key in a)


def loaded_from(hub, folder, revision="main"):
    """The drafter in the repository, by way of its files."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in hub.files(NAME, revision).items():
        (folder / path).write_bytes(content)
    return CarryoverDrafter.from_pretrained(folder)


# There and back


@pytest.mark.compat
def test_round_trip(hub, drafter, target):
    info = push(drafter)
    assert info.oid == hub.repos[NAME].refs["main"]
    assert len(hub.titles(NAME)) == 2  # with the one that creating made
    loaded = CarryoverDrafter.from_pretrained(NAME, token=TOKEN)
    assert equal_state(loaded, drafter)
    assert loaded.config.to_diff_dict() == drafter.config.to_diff_dict()
    want = plain(target, prompt_ids(), max_new_tokens=20)
    assert assisted(target, prompt_ids(), loaded, max_new_tokens=20).tolist() == want.tolist()
    inputs = {"features": torch.randn(1, 9, drafter.config.feature_size), "anchor_positions": torch.tensor([5])}
    inputs |= {"anchor_embeds": torch.randn(1, 32), "sequence_index": torch.tensor([0])}
    head = target.get_output_embeddings().weight
    with torch.no_grad():
        logits = [one(**inputs, head_weight=head).logits for one in (drafter, loaded)]
    assert torch.equal(*logits)


def test_files_of_a_push(hub, drafter):
    push(drafter, report=REPORT, system="carryover")
    files = hub.files(NAME)
    expected = {".gitattributes", "README.md", "config.json", "model.safetensors", "report.json"}
    assert set(files) == expected | {"configuration_carryover.py", "modeling_carryover.py"}
    assert json.loads(files["report.json"])["summary"] == json.loads(REPORT.read_text())["summary"]


def test_figures_go_along(hub, drafter, tmp_path):
    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "bench.json").write_text(REPORT.read_text())
    (folder / "tau.png").write_bytes(b"\x89PNG")
    (folder / "notes.txt").write_text("not for others")
    push(drafter, report=folder)
    assert {"report.json", "tau.png"} <= set(hub.files(NAME)) and "notes.txt" not in hub.files(NAME)


def test_private_and_branches(hub, drafter, target):
    push(drafter, private=True)
    assert hub.repos[NAME].private
    with pytest.raises(OSError, match="is not a local folder and is not a valid model identifier"):
        CarryoverDrafter.from_pretrained(NAME, token=False)
    second = other(target)
    push(second, revision="longer")
    assert equal_state(CarryoverDrafter.from_pretrained(NAME, token=TOKEN), drafter)
    assert equal_state(CarryoverDrafter.from_pretrained(NAME, revision="longer", token=TOKEN), second)
    head = hub.repos[NAME].refs["main"]
    push(second)
    assert equal_state(CarryoverDrafter.from_pretrained(NAME, revision=head, token=TOKEN), drafter)


def test_pull_request(hub, drafter, target):
    push(drafter)
    head = hub.repos[NAME].refs["main"]
    info = push(other(target), create_pr=True)
    assert info.pr_url == f"{hub.endpoint}/{NAME}/discussions/1"
    assert hub.repos[NAME].refs["main"] == head
    assert equal_state(CarryoverDrafter.from_pretrained(NAME, revision="refs/pr/1", token=TOKEN), other(target))
    with pytest.raises(ValueError, match="A pull request goes to 'main'; `revision` is 'unknown'"):
        push(drafter, create_pr=True, revision="unknown")


def test_pushing_the_same_again_makes_no_commit(hub, drafter):
    first = push(drafter)
    second = push(drafter)
    assert first.oid == second.oid


def test_stale_shards_leave_with_the_commit(hub, drafter):
    push(drafter)
    files = hub.repos[NAME].resolve("main").files
    files["model-00001-of-00002.safetensors"] = b"old"
    files["mine.txt"] = b"kept"
    push(drafter, commit_message="Again")
    assert "model-00001-of-00002.safetensors" not in hub.files(NAME)
    assert hub.files(NAME)["mine.txt"] == b"kept"


def test_in_a_process_of_its_own(hub, drafter, tmp_path):
    """As a user does it: `HF_ENDPOINT`, a stored token, and without the package remote code."""
    drafter.save_pretrained(tmp_path / "drafter")
    os.environ.update(HF_ENDPOINT=hub.endpoint, HF_TOKEN=TOKEN, HF_HOME=str(tmp_path / "home"), HF_HUB_DISABLE_XET="1")
    code = f"""
import os
os.environ["HF_HUB_OFFLINE"] = "0"
import torch, hf_carryover
drafter = hf_carryover.CarryoverDrafter.from_pretrained("drafter")
print(hf_carryover.push_to_hub(drafter, {NAME!r}, base_model={BASE!r}).oid)
back = hf_carryover.CarryoverDrafter.from_pretrained({NAME!r})
print(all(torch.equal(a, b) for a, b in zip(drafter.state_dict().values(), back.state_dict().values())))
"""
    try:
        oid, same = python(code, folder=tmp_path).split()[-2:]
        assert (oid, same) == (hub.repos[NAME].refs["main"], "True")
        # Without the package: its folder is not in reach of this process.
        alone = f"""
import os, sys
os.environ["HF_HUB_OFFLINE"] = "0"
sys.path[:] = [path for path in sys.path if path != {str(Path(hf_carryover.__file__).parents[1])!r}]
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_carryover":
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
from transformers import AutoModel
drafter = AutoModel.from_pretrained({NAME!r}, trust_remote_code=True)
print(type(drafter).__name__, "hf_carryover" in sys.modules)
try:
    drafter.generation_config
except AttributeError as error:
    print(error)
"""
        printed = python(alone, folder=tmp_path).splitlines()
        assert printed[-2] == "CarryoverDrafter False"
        assert "`pip install hf_carryover` and `import hf_carryover`" in printed[-1]
    finally:
        for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_HOME", "HF_HUB_DISABLE_XET"):
            os.environ.pop(name, None)


def test_auto_model_from_the_hub(hub, drafter):
    push(drafter)
    assert type(AutoModel.from_pretrained(NAME, token=TOKEN)) is CarryoverDrafter


def test_from_a_trainer(hub, target, tmp_path):
    drafter = tiny_drafter(target, carry=True)
    trainer = make_trainer(target, drafter, tmp_path / "my-run", random_rows([14, 18]), max_steps=2)
    trainer.train()
    trainer.evaluate(random_rows([16]))
    info = trainer.push_to_hub(token=TOKEN, repo_id=NAME, base_model=BASE, license="apache-2.0")
    files = hub.files(NAME)
    assert info.oid == hub.repos[NAME].refs["main"]
    assert {"training.json", "training_log.jsonl"} <= set(files)
    record = json.loads(files["training.json"])
    assert record["training_arguments"]["max_steps"] == 2
    assert record["metrics"]["eval_blocks"] > 0
    assert TOKEN.encode() not in b"".join(files.values())
    card = files["README.md"].decode()
    assert "| carryover | 2 |" in card and "--max_steps 2" in card
    assert equal_state(loaded_from(hub, tmp_path / "back"), drafter)
    trainer.create_model_card()
    assert "# my-run" in (tmp_path / "my-run" / "README.md").read_text()
    with pytest.raises(TypeError, match="Expected a CarryoverDrafter or a CarryoverTrainer, got LlamaForCausalLM"):
        push(target)


# Whose repository


def test_another_models_repository_is_left_alone(hub, drafter, target):
    push(drafter)
    before = hub.files(NAME)
    narrow = tiny_drafter(target, markov_rank=4)
    narrow.config.vocab_size = 99
    with pytest.raises(
        ValueError, match=r"holds a drafter for another target: .* \(64, 32, 4\); this one is for \(99"
    ):
        push(narrow)
    with pytest.raises(ValueError, match="holds a drafter for user/target, this one is for user/other"):
        push(drafter, base_model="user/other")
    assert hub.files(NAME) == before
    push(drafter, base_model="user/other", force=True)
    assert "user/other" in hub.files(NAME)["README.md"].decode()


def test_a_language_models_repository_is_left_alone(hub, drafter, target):
    push(drafter)
    hub.repos[NAME].resolve("main").files["config.json"] = json.dumps({"architectures": ["LlamaForCausalLM"]}).encode()
    with pytest.raises(ValueError, match="holds another model, not a drafter"):
        push(drafter)
    del hub.repos[NAME].resolve("main").files["config.json"]
    with pytest.raises(ValueError, match=r"holds model\.safetensors and no drafter"):
        push(drafter)
    assert len(hub.titles(NAME)) == 2


@pytest.mark.parametrize(("token", "status"), [("hf_wrong", 401), (READ_ONLY, 403)])
def test_not_allowed(hub, drafter, token, status):
    push(drafter)
    before = hub.files(NAME)
    with pytest.raises(HfHubHTTPError) as caught:
        push(other_of(drafter), token=token)
    assert caught.value.response.status_code == status
    assert hub.files(NAME) == before


def other_of(drafter):
    changed = CarryoverDrafter(drafter.config)
    changed.load_state_dict(
        {key: value + 1 if value.is_floating_point() else value for key, value in drafter.state_dict().items()}
    )
    return changed


def test_somebody_else_commits_meanwhile(hub, drafter):
    push(drafter)
    repo, route = hub.repos[NAME], hub.http.RequestHandlerClass._preupload

    def busy(self, query, body, repo_id=None, **kwargs):
        if len(repo.commits) == 2:
            head = repo.resolve("main")
            repo.refs["main"] = repo.add(head.oid, "theirs", {**head.files, "theirs.txt": b"1"}).oid
        return route(self, query, body, **kwargs)

    hub.http.RequestHandlerClass._preupload = busy
    with pytest.raises(ValueError, match="was changed by somebody else during the push; nothing was committed"):
        push(other_of(drafter))
    assert hub.titles(NAME)[0] == "theirs"


# What is not in our own format


def test_public_drafter_from_the_hub(hub, tmp_path):
    from convert_helpers import zlab_folder

    folder = zlab_folder(tmp_path / "zlab")
    repo = hub.repos["z-lab/drafter"] = Repo(private=False)
    repo.refs["main"] = repo.add(None, "first", {path.name: path.read_bytes() for path in folder.iterdir()}).oid
    drafter = CarryoverDrafter.from_pretrained("z-lab/drafter", carry=True)
    assert drafter.config.converted_from["format"] == "z-lab" and drafter.config.carry
    assert equal_state(drafter, CarryoverDrafter.from_pretrained(folder, carry=True))
    with pytest.raises(ValueError, match="z-lab/drafter holds a drafter for another target: z-lab"):
        push_to_hub(drafter, "z-lab/drafter", token=TOKEN)


def test_adapter_there_and_back(hub, target):
    peft = pytest.importorskip("peft")
    push_to_hub(tiny_drafter(target, markov_rank=4, carry=False), "user/base", token=TOKEN)
    adapted = CarryoverDrafter.from_pretrained("user/base", carry=True)
    add_adapter(adapted, peft.LoraConfig(r=2, init_lora_weights=False))
    push(adapted)
    files = hub.files(NAME)
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= set(files)
    assert "model.safetensors" not in files
    assert "on the drafter `user/base`" in files["README.md"].decode()
    loaded = CarryoverDrafter.from_pretrained(NAME)
    assert equal_state(loaded, adapted)
    push(adapted, commit_message="Again")
    with pytest.raises(ValueError, match="holds an adapter, this is a drafter"):
        push(tiny_drafter(target, markov_rank=4))
    with pytest.raises(ValueError, match="user/base holds another model, this is an adapter"):
        push_to_hub(adapted, "user/base", token=TOKEN)
    adapted.adapter_base["base"] = "user/other"
    with pytest.raises(ValueError, match="holds an adapter of user/base, this one is of user/other"):
        push(adapted)


# Faults


def prepare(hub, drafter, state):
    """The state before, what a push is called with, and where its result shows."""
    if state == "new repository":
        return {}, "main"
    push(drafter)
    return ({"create_pr": True}, "refs/pr/1") if state == "pull request" else ({}, "main")


def requests_of_a_push(hub, drafter, new, state):
    """The requests, once all that is asked once per process or kept in the cache has been asked."""
    for _ in range(2):
        arguments, _ = prepare(hub, drafter, state)
        start = len(hub.requests)
        push(new, **arguments)
        requests = hub.requests[start:]
        hub.repos.clear(), hub.objects.clear()
    return requests


FAULTS = [
    pytest.param(state, kind, marks=pytest.mark.slow if slow else [], id=f"{state}-{kind}".replace(" ", "-"))
    for state, kind, slow in [
        ("new repository", "lost", False),
        ("existing repository", "drop", False),
        ("existing repository", "lost", False),
        ("existing repository", 503, False),
        ("existing repository", 429, True),
        ("existing repository", 500, True),
        ("new repository", "drop", True),
        ("new repository", 500, True),
        ("pull request", "drop", True),
        ("pull request", "lost", False),
        ("pull request", 503, True),
    ]
]


@pytest.mark.parametrize(("state", "kind"), FAULTS)
def test_one_fault_at_every_request_in_turn(hub, drafter, target, state, kind):
    """Whichever request fails once: the push ends well, with one commit, of all files."""
    new = other(target)
    requests = requests_of_a_push(hub, drafter, new, state)
    assert len(requests) >= 6
    for number, request in enumerate(requests):
        arguments, revision = prepare(hub, drafter, state)
        hub.fault = Fault(kind, first=number)
        push(new, **arguments)
        hub.fault = None
        where = f"{kind} at {number}: {request}"
        assert len(hub.titles(NAME, revision)) == (2 if state == "new repository" else 3), where
        assert sum(ref.startswith("refs/pr/") for ref in hub.repos[NAME].refs) == (state == "pull request"), where
        check_new(hub, new, revision)
        hub.repos.clear(), hub.objects.clear()


def check_new(hub, new, revision):
    from safetensors.torch import load

    state = load(hub.files(NAME, revision)["model.safetensors"])
    assert all(torch.equal(value, state[key]) for key, value in new.state_dict().items())
    assert {"README.md", "config.json"} <= set(hub.files(NAME, revision))


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        *FAULTS,
        pytest.param("existing repository", 401, id="existing-repository-401"),
        pytest.param("existing repository", 403, id="existing-repository-403", marks=pytest.mark.slow),
    ],
)
def test_everything_fails_from_a_request_on(hub, drafter, target, state, kind):
    """The old state is left, or where the commit was carried out and only its answer lost the new one."""
    new = other(target)
    requests = requests_of_a_push(hub, drafter, new, state)
    for number, request in enumerate(requests):
        arguments, revision = prepare(hub, drafter, state)
        before = hub.files(NAME, revision)
        hub.fault = Fault(kind, first=number, count=-1)
        with pytest.raises(Exception) as caught:
            push(new, **arguments)
        assert not isinstance(caught.value, AssertionError)
        hub.fault = None
        after, where = hub.files(NAME, revision), f"{kind} from {number}: {request}"
        # The commit is the last request, so what fails for good in front of it or at it leaves the old state; only a
        # commit that was carried out and whose answer got lost leaves the new one.
        if kind == "lost" and "/commit/" in request:
            check_new(hub, new, revision)
        else:
            assert after == before or set(after) == {".gitattributes"}, where
        hub.repos.clear(), hub.objects.clear()


def test_tries_are_counted(hub, drafter):
    push(drafter)
    hub.fault = Fault(500, count=-1, match="POST .*/commit/")
    start = len(hub.requests)
    with pytest.raises(HfHubHTTPError, match="500"):
        push(other_of(drafter))
    assert sum("/commit/" in request for request in hub.requests[start:]) == ATTEMPTS


def test_no_second_try_where_it_cannot_help(hub, drafter):
    push(drafter)
    hub.fault = Fault(409, count=-1, match="POST .*/commit/")
    start = len(hub.requests)
    with pytest.raises(HfHubHTTPError):
        push(other_of(drafter))
    assert sum("/commit/" in request for request in hub.requests[start:]) == 1


# Cards


def card_of(drafter, **kwargs):
    return model_card(drafter, NAME, **{"base_model": BASE, "license": "apache-2.0", **kwargs})


def test_metadata(drafter, tmp_path):
    card = card_of(drafter, report=REPORT, language="en", datasets=["user/prompts"])
    card.save(tmp_path / "README.md")
    data = metadata_load(tmp_path / "README.md")
    assert data["base_model"] == BASE
    assert data["base_model_relation"] == "adapter"
    assert data["library_name"] == "hf_carryover"
    assert data["pipeline_tag"] == "text-generation"
    assert data["license"] == "apache-2.0"
    assert data["datasets"] == ["user/prompts"]
    assert data["metrics"] == ["acceptance_length", "speedup"]
    assert "speculative-decoding" in data["tags"]
    (model,) = data["model-index"]
    assert model["name"] == NAME
    report = json.loads(REPORT.read_text())["summary"]["groups"]
    found = {
        (result["dataset"]["type"], metric["type"]): metric["value"]
        for result in model["results"]
        for metric in result["metrics"]
    }
    for group, numbers in report.items():
        tau = numbers["systems"]["carryover"]["tau"]["value"]
        assert found[group.replace(" ", "_"), "acceptance_length"] == pytest.approx(tau, abs=1e-4)
    # huggingface_hub reads back what it wrote, and validates it on the way.
    again = ModelCard.load(tmp_path / "README.md").data
    assert isinstance(again, ModelCardData) and len(again.eval_results) == len(found)
    assert all(result.metric_args["level"] == 0.95 for result in again.eval_results)


def test_card_says_what_the_report_says(drafter):
    text = str(card_of(drafter, report=REPORT))
    groups = json.loads(REPORT.read_text())["summary"]
    change = groups["comparisons"]["carryover - control"]["mean of sets"]["tau_change"]
    assert f"by {change['value']:+.1%} [{change['low']:+.1%}, {change['high']:+.1%}] on the mean of sets" in text
    assert "**no gain is shown** by this pair" in text
    row = next(line for line in text.splitlines() if line.startswith("| humaneval |"))
    values = groups["groups"]["humaneval"]["systems"]
    assert row.split("|")[3:6] == [
        f" {values[name]['tau']['value']:.2f} " for name in ("baseline", "control", "carryover")
    ]
    assert f"MARKOV HEAD OF RANK {drafter.config.markov_rank}" in text.upper()
    assert '"num_speculative_tokens": 4' in text
    assert f'CarryoverDrafter.from_pretrained("{NAME}"' in text


def test_card_without_a_report_claims_nothing(drafter):
    card = card_of(drafter)
    text = str(card)
    assert "No benchmark report was published" in text and "No training record was published" in text
    assert "model-index" not in text and card.data.metrics is None
    assert not re.search(r"\bNone\b|\{\{|\}\}", text)


@pytest.mark.parametrize("change", ["better", "worse", "none", "alone"])
def test_verdict_follows_the_interval(drafter, change):
    report = json.loads(REPORT.read_text())
    pair = report["summary"]["comparisons"]["carryover - control"]
    low, high = {"better": (0.01, 0.03), "worse": (-0.03, -0.01)}.get(change, (-0.01, 0.02))
    pair["mean of sets"]["tau_change"] = {"value": (low + high) / 2, "low": low, "high": high}
    if change == "alone":
        report["summary"]["comparisons"] = {}
    text = str(card_of(drafter, report=report))
    words = {"better": ": a gain.", "worse": ": a loss.", "none": "**no gain is shown**", "alone": "No control was"}
    assert words[change] in text
    assert sum(word in text for word in words.values()) == 1


def test_card_of_a_converted_drafter(tmp_path, target):
    from convert_helpers import zlab_folder

    drafter = CarryoverDrafter.from_pretrained(zlab_folder(tmp_path / "zlab"))
    assert "It was converted from a z-lab checkpoint" in str(card_of(drafter))
    assert "It does not carry" in str(card_of(drafter))


def test_shipped_records_can_be_read():
    folder = Path(__file__).parents[1] / "model_cards" / "smollm2-135m-markov-carryover"
    run = Run.read(folder)
    assert run.steps == 300 and run.seconds > 0
    assert run.command().startswith("hf-carryover train --target TARGET --recordings RECORDINGS")
    with pytest.raises(ValueError, match=r"is no training run: it has no `training\.json`"):
        Run.read(folder.parent)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{}", "is not a report of `hf-carryover bench`: it has no schema_version"), (None, "does not exist")],
)
def test_what_is_no_report(drafter, tmp_path, content, message):
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        card_of(drafter, report=path)
    with pytest.raises(
        ValueError, match="The report has no system 'mine', only baseline, control, carryover, prompt_lookup"
    ):
        card_of(drafter, report=REPORT, system="mine")


@pytest.mark.parametrize("path", sorted(CARDS.glob("*/README.md")), ids=lambda path: path.parent.name)
def test_cards_of_the_repository(path):
    """Their metadata is valid, and a card without weights beside it claims none."""
    card = ModelCard.load(path)
    assert card.data.library_name == "hf_carryover" and card.data.base_model_relation == "adapter"
    assert card.data.base_model.count("/") == 1
    weights = list(path.parent.glob("*.safetensors"))
    if path.parent.name.startswith("recipe-"):
        assert not weights and "**No weights are published yet.**" in card.text
        assert card.data.eval_results is None
        named = re.findall(r"\.\./\.\./(recipes/\S+?\.yaml)", card.text)
        assert len(set(named)) == 3 and all((CARDS.parent / name).is_file() for name in named)
    else:
        assert weights


def test_template_is_the_packages():
    assert (CARDS / "template.md").resolve() == TEMPLATE.resolve()
