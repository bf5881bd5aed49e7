# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Muon for the matrices inside the layers, AdamW for everything else, as one optimizer."""

from __future__ import annotations

import torch
from torch import nn


class MuonAdamW(torch.optim.Optimizer):
    """
    torch's Muon on some parameters and AdamW on the others, behind one interface.

    Muon's updates are scaled to the size of AdamW's (`match_rms_adamw`), so one learning rate serves both.

    Args:
        muon_groups, adamw_groups (`list[dict]`): Parameter groups of the two, each with its `lr`.
        adamw_kwargs: Of AdamW; its `weight_decay` is that of groups that have none of their own.
    """

    def __init__(self, muon_groups: list[dict], adamw_groups: list[dict], **adamw_kwargs):
        decay = adamw_kwargs.get("weight_decay", 0.0)
        self.parts = [
            torch.optim.Muon(muon_groups, weight_decay=decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(adamw_groups, **adamw_kwargs),
        ]
        super().__init__([{"params": [p for part in self.parts for g in part.param_groups for p in g["params"]]}], {})
        # The very groups of the two: a scheduler that sets a learning rate here sets it there.
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        """One step of both."""
        if closure is not None:
            raise ValueError("`closure` is not supported.")
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict:
        """Those of the two parts."""
        return {"parts": [part.state_dict() for part in self.parts], "state": {}, "param_groups": []}

    def load_state_dict(self, state_dict: dict) -> None:
        """As saved by `state_dict`."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def is_muon_parameter(name: str, parameter: nn.Parameter) -> bool:
    """Matrices inside the layers: what Muon is for. Embeddings, heads, the fusion, norms and vectors are not."""
    return name.startswith("layers.") and parameter.dim() == 2


def split_for_muon(model: nn.Module, groups: list[dict]) -> tuple[list[dict], list[dict]]:
    """Splits parameter groups of a drafter in two, every group keeping its own settings."""
    muon = {parameter for name, parameter in model.named_parameters() if is_muon_parameter(name, parameter)}
    keep = {"lr", "weight_decay", "scaled"}
    first, second = [], []
    for group in groups:
        own = {key: value for key, value in group.items() if key in keep}
        for part, chosen in ((first, True), (second, False)):
            parameters = [parameter for parameter in group["params"] if (parameter in muon) == chosen]
            if parameters:
                part.append({**own, "params": parameters})
    return first, second
