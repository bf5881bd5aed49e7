"""R37: what somebody wrote into a card on the Hub is not replaced by a generated one."""

import pytest
from conftest import tiny_drafter, tiny_llama
from hub_server import TOKEN
from huggingface_hub import HfApi, ModelCardData, metadata_load
from test_hub import BASE, NAME, drafter, hub, other, push  # noqa: F401 (fixtures)

from hf_carryover.hub.card import is_edited, model_card, stamp


def card_of(hub):  # noqa: F811
    return hub.files(NAME)["README.md"].decode()


def write(text):
    HfApi(token=TOKEN).upload_file(path_or_fileobj=text.encode(), path_in_repo="README.md", repo_id=NAME)


@pytest.mark.parametrize("ends", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_only_words_of_others_count(ends):
    card = "---\ntags:\n- a\n---\n# Title\n\nText.\n"
    ours = stamp(card).replace("\n", ends)
    assert not is_edited(ours)
    assert is_edited(ours.replace("Text", "My text"))
    assert is_edited(ours.replace("- a", "- b"))
    assert is_edited(ours + f"My notes.{ends}")
    assert is_edited(card.replace("\n", ends))
    assert not is_edited("---\nlicense: mit\n---\n".replace("\n", ends))  # what the Hub starts a repository with
    assert not is_edited("")
    assert stamp(card).startswith(card)


def test_a_card_nobody_touched_is_made_anew(hub, drafter, target, caplog):  # noqa: F811
    push(drafter)
    before = card_of(hub)
    push(other(target), datasets=["user/data"])
    assert card_of(hub) != before
    assert "user/data" in card_of(hub)
    assert not is_edited(card_of(hub))
    assert "was edited" not in caplog.text


def test_an_edited_card_is_kept_and_the_rest_pushed(hub, drafter, target, caplog):  # noqa: F811
    push(drafter)
    edited = card_of(hub).replace("## Limits", "## What I found\n\nIt likes poems.\n\n## Limits")
    write(edited)
    weights = hub.files(NAME)["model.safetensors"]
    push(other(target))
    assert card_of(hub) == edited
    assert hub.files(NAME)["model.safetensors"] != weights
    assert "The card of user/drafter was edited and is kept" in caplog.text
    # Kept again: the stamp in it is still that of other words.
    push(drafter)
    assert card_of(hub) == edited


@pytest.mark.parametrize("how", ["force", "card"])
def test_an_edited_card_is_replaced_when_asked(how, hub, drafter):  # noqa: F811
    push(drafter)
    write("# All mine\n")
    push(drafter, **({"force": True} if how == "force" else {"card": "# Another\n"}))
    assert "All mine" not in card_of(hub)
    assert not is_edited(card_of(hub))
    assert ("# Another" in card_of(hub)) == (how == "card")


def test_a_repository_that_began_with_a_licence_gets_a_card(hub, drafter, tmp_path):  # noqa: F811
    HfApi(token=TOKEN).create_repo(NAME)
    write(f"---\n{ModelCardData(license='mit').to_yaml()}\n---\n")
    push(drafter)
    (tmp_path / "README.md").write_text(card_of(hub))
    assert metadata_load(tmp_path / "README.md")["base_model"] == BASE


ADDED = {"plain": {}, "lookup": {"lookup_ngram_size": 3}, "pointer": {"carry_pointer": True}}


@pytest.mark.parametrize("added", ADDED.values(), ids=ADDED)
def test_cards_say_what_a_drafter_adds_and_what_serves_it(added):
    card = str(model_card(tiny_drafter(tiny_llama(), **added), "user/drafter", base_model="user/target"))
    assert ("VLLM_USE_V2_MODEL_RUNNER=0 vllm serve" in card) == bool(added)
    assert ("n-grams of up to 3 tokens looked up" in card) == ("lookup_ngram_size" in added)
    assert ("points at the target's predictions there" in card) == ("carry_pointer" in added)
