# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Model cards: every number is read from the drafter, the records of its training, or a benchmark report."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..adapters import has_adapter
from ..modeling_carryover import CarryoverDrafter
from .results import eval_results, read_report, result_tables, system_of, verdict
from .run import Run, stage_table


TEMPLATE = Path(__file__).parent / "card_template.md"
TAGS = ("speculative-decoding", "draft-model", "dflash", "carryover", "hf_carryover")
DEFAULT_LIMITS = (
    "The output is the target's in every case: a drafter that fits a text badly only makes it slower. Acceptance "
    "depends on the kind of text; measure it on yours with `hf-carryover bench`. The drafter works with this target "
    "only, and with one sequence at a time in `generate`."
)


# The last line of a card as it is pushed. With it a later push can tell a card that somebody edited from its own.
_STAMP = "<!-- Written by hf_carryover; edited, this card is kept by later pushes. {} -->"
_STAMPED = re.compile(re.escape(_STAMP).replace(re.escape("{}"), "([0-9a-f]{16})"))


def stamp(card: str) -> str:
    """`card` with the line that [`is_edited`] looks for."""
    return f"{card.rstrip()}\n\n{_STAMP.format(_digest(card))}\n"


def is_edited(card: str) -> bool:
    """Whether a card in a repository holds words of others: it has some, and is no card as [`stamp`] left it."""
    found = _STAMPED.search(card)
    if found and found[1] == _digest(card[: found.start()]) and not card[found.end() :].strip():
        return False
    return bool(re.sub(r"\A---\n.*?\n---\n?", "", card.replace("\r\n", "\n"), flags=re.DOTALL).strip())


def _digest(card: str) -> str:
    # Line ends may change on the way through a browser or git.
    return hashlib.sha256(card.replace("\r\n", "\n").rstrip().encode()).hexdigest()[:16]


def is_hub_id(name: str) -> bool:
    """Whether `name` can be that of a repository; a path that begins with a dot, a slash or a tilde can't."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def hub_id_of(name: str | None) -> str | None:
    """`name`, under which a model was loaded, if it is its name on the Hub: not one without owner, nor a folder."""
    return name if name and name.count("/") == 1 and is_hub_id(name) and not Path(name).exists() else None


def model_card(
    drafter: CarryoverDrafter,
    name: str,
    *,
    base_model: str | None = None,
    runs: dict[str, Run] | None = None,
    report: dict | str | Path | None = None,
    system: str | None = None,
    license: str | None = None,
    language: str | list[str] | None = None,
    datasets: list[str] | None = None,
    place: str | None = None,
    data: str | None = None,
    limits: str | None = None,
    more_results: str | None = None,
) -> ModelCard:
    """
    The card of a drafter.

    Args:
        drafter ([`CarryoverDrafter`]): What the card is about.
        name (`str`): Title, and name in the `model-index`.
        base_model (`str`, *optional*): Hub id of the target.
        runs (`dict[str, Run]`, *optional*): Training runs by stage, the drafter's own last.
        report (`dict`, `str` or `Path`, *optional*): Report of `hf-carryover bench`, see [`read_report`].
        system (`str`, *optional*): What the report calls this drafter, by default `"carryover"` or its last system.
        license, language, datasets (*optional*): Metadata, as on the Hub.
        place (`str`, *optional*): Where it is loaded from, `name` by default.
        data (`str`, *optional*): What it was trained on, in words.
        limits (`str`, *optional*): What it is not good for, instead of the general words.
        more_results (`str`, *optional*): Markdown to go behind those of the report.

    Returns:
        `huggingface_hub.ModelCard`, whose metadata its own classes have validated.

    Raises:
        ValueError: If the report or the metadata are not valid, or a path stands where the Hub expects a name.
    """
    for key, named in (("base_model", base_model), ("datasets", datasets)):
        names = named if isinstance(named, list) else [named]
        wrong = [given for given in names if given is not None and not is_hub_id(given)]
        if wrong:
            raise ValueError(
                f"`{key}` must be a Hub id, such as 'owner/name', got {wrong[0]!r}: the Hub refuses a card that names "
                "a local path. Leave it out where the model or data set has no name there."
            )
    content, _ = read_report(report)
    chosen = system_of(content, system) if content is not None else None
    metadata = ModelCardData(
        base_model=base_model,
        base_model_relation=None if base_model is None else "adapter",
        library_name="hf_carryover",
        pipeline_tag="text-generation",
        tags=list(TAGS),
        license=license,
        language=language,
        datasets=datasets,
        metrics=["acceptance_length", "speedup"] if content is not None else None,
        eval_results=eval_results(content, chosen) if content is not None else None,
        model_name=name if content is not None else None,
    )
    results = "No benchmark report was published with this drafter."
    if content is not None:
        results = f"{verdict(content, chosen)}\n\n{result_tables(content, chosen)}"
    if more_results:
        results = f"{results}\n\n{more_results}"
    return ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        name=name,
        base_link="its target" if base_model is None else f"[{base_model}](https://huggingface.co/{base_model})",
        base_model=base_model or "TARGET",
        place=place or name,
        block_size=drafter.config.block_size,
        serve_with=_serve_with(drafter),
        role=_role(drafter),
        shape=_shape(drafter),
        head=_head(drafter),
        origin=_origin(drafter),
        results=results,
        training=_training(runs or {}, data, base_model),
        limits=limits or DEFAULT_LIMITS,
    )


def _role(drafter: CarryoverDrafter) -> str:
    if not drafter.config.carry:
        return "It does not carry: a plain DFlash or Markov drafter, or a control."
    what = {
        "states": "the target's hidden states",
        "predictions": "the target's predictions",
        "proposals": "the rejected tokens",
        "states_and_predictions": "the target's hidden states and predictions",
    }[drafter.config.carry_from]
    also = ", and points at the target's predictions there" if drafter.config.points_at_carried else ""
    return f"It reads {what} at the rows the round before rejected (carry on){also}."


def _serve_with(drafter: CarryoverDrafter) -> str:
    """What stands in front of `vllm serve`: drafters that look up or point need the V1 model runner."""
    needs_v1 = drafter.config.lookup_ngram_size or drafter.config.points_at_carried
    return "VLLM_USE_V2_MODEL_RUNNER=0 " if needs_v1 else ""


def _shape(drafter: CarryoverDrafter) -> str:
    config = drafter.config
    parameters = sum(p.numel() for p in drafter.parameters()) / 1e6
    markov = f", Markov head of rank {config.markov_rank}" if config.markov_rank else ""
    lookup = f", n-grams of up to {config.lookup_ngram_size} tokens looked up" if config.lookup_ngram_size else ""
    reduced = "" if config.draft_vocab_size is None else f", draft vocabulary of {config.draft_vocab_size} tokens"
    layout = ", anchor-first blocks" if config.anchor_first else ""
    return (
        f"{config.num_hidden_layers} Qwen3-style layers of width {config.hidden_size}, B = {config.block_size} "
        f"proposals a round{layout}{markov}{lookup}{reduced}, features from target layers {config.target_layer_ids}; "
        f"{parameters:.{0 if parameters >= 100 else 1 if parameters >= 1 else 3}f} M parameters, "
        f"{str(drafter.dtype).removeprefix('torch.')}."
    )


def _head(drafter: CarryoverDrafter) -> str:
    if drafter.config.own_head:
        return "The embedding is the target's and is not part of it; the head is its own."
    return "Embedding and head are the target's and are not part of it."


def _origin(drafter: CarryoverDrafter) -> str:
    origin = drafter.config.converted_from
    if has_adapter(drafter):
        base = drafter.adapter_base["base"] or "a drafter without a name"
        return (
            f"It is an adapter: PEFT layers and the carry embedding on the drafter `{base}`, which is loaded with it."
        )
    if not origin:
        return ""
    return f"It was converted from a {origin['format']} checkpoint; `config.json` keeps that one's configuration."


def _training(runs: dict[str, Run], data: str | None, base_model: str | None) -> str:
    if not runs and data is None:
        return "No training record was published with this drafter."
    parts = [data] if data else []
    if runs:
        parts.append(stage_table(runs))
        for name, run in runs.items():
            parts.append(f"```bash\n{run.command()} --output_dir runs/{name}\n```")
        record = next(reversed(runs.values())).record
        versions = ", ".join(f"{key} {value}" for key, value in (record.get("versions") or {}).items())
        commit = f" Commit {record['commit'][:12]}." if record.get("commit") else ""
        parts.append(
            "`TARGET` is the target, `RECORDINGS` its recorded responses, the only supervision. Losses are the "
            "position-weighted cross entropy in nats; the training loss is the mean of the last tenth of the steps; "
            "simulated τ is 1 + accepted proposals at sampled anchors of held-out recordings, for the stage "
            f"`carryover` at their shifted anchors. {versions}.{commit}"
        )
    return "\n\n".join(parts)


def finite(value: Any) -> Any:
    """`value` with `None` for every number that JSON and YAML have no common word for."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


__all__ = ["Run", "model_card"]
