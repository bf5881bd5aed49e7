"""
Draft–verify–draft training, slowly: one anchor at a time.

Written from the method's description alone. The target runs on plain token lists without cache or mask, and the
drafter is spelled out here as matrix products over concatenated keys. Nothing of the trainer or of the drafter's
forward pass is called; of the drafter only its weights and its configuration are read.
"""

import math
from dataclasses import dataclass

import torch


@dataclass
class ReferenceBlock:
    """
    One block of the loss.

    Args:
        first_anchor, anchor (`int`): The sampled anchor `a`, and `a'`, equal to it without a first draft.
        proposals (`list[int]`): Of the first draft; empty without one.
        accepted (`int`): `m` of the first draft.
        states (`torch.Tensor` of shape `(B + 1, feature_size)`): `h_0 … h_B` of the branch; `None` without one.
        carried_positions (`list[int]`), carried (`torch.Tensor` of shape `(B - m, feature_size)`): The rejected rows.
        losses (`torch.Tensor` of shape `(B,)`): Weighted, with gradient.
        second (`list[int]`): Proposals of the block itself.
        second_accepted (`int`), judged (`int`): Proposals of the block equal to the recording, and how many exist.
    """

    first_anchor: int
    anchor: int
    proposals: list
    accepted: int
    states: torch.Tensor | None
    carried_positions: list
    carried: torch.Tensor | None
    losses: torch.Tensor
    second: list
    second_accepted: int
    judged: int


class SlowReference:
    """
    Args:
        target (`PreTrainedModel`), drafter ([`CarryoverDrafter`]): The pair.
        gamma (`float`), alpha_ce (`float`), alpha_tv (`float`): Of the loss.
        first_draft (`bool`): Draft–verify–draft; without it the loss is that of the sampled anchor's block.
    """

    def __init__(self, target, drafter, gamma, alpha_ce=1.0, alpha_tv=0.0, first_draft=True):
        self.target, self.config = target, drafter.config
        self.gamma, self.alpha_ce, self.alpha_tv, self.first_draft = gamma, alpha_ce, alpha_tv, first_draft
        self.weights = dict(drafter.named_parameters())
        self.vocabulary = list(range(drafter.config.vocab_size))
        if drafter.d2t is not None:
            self.vocabulary = [i + int(offset) for i, offset in enumerate(drafter.d2t)]
        base = target.get_base_model() if hasattr(target, "get_base_model") else target
        self.embed = base.get_input_embeddings()
        self.head = base.get_output_embeddings()
        self.own_head = drafter.head_weight

    # The target

    @torch.no_grad()
    def run_target(self, tokens):
        """Features `(length, feature_size)` and logits `(length, vocab)` of a token list."""
        outputs = self.target(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        layers = [outputs.hidden_states[k + 1][0] for k in self.config.target_layer_ids]
        return torch.cat(layers, dim=-1), outputs.logits[0].float()

    @torch.no_grad()
    def embedding(self, token):
        if self.config.embedding_scale is not None:
            return self.embed.weight[token] * self.config.embedding_scale
        return self.embed(torch.tensor([[token]]))[0, 0]

    # The drafter

    def norm(self, name, states):
        scale = torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return states * scale * self.weights[f"{name}.weight"]

    def linear(self, name, states):
        bias = self.weights.get(f"{name}.bias")
        product = states @ self.weights[f"{name}.weight"].T
        return product if bias is None else product + bias

    def rotate(self, states, position):
        """
        Rotary embedding of `(heads, head_dim)` at one position: of the first `r` dimensions, `i` is paired with
        `i + r / 2`; the others stay.
        """
        rope = self.config.rope_parameters
        half = int(states.shape[-1] * rope.get("partial_rotary_factor", 1.0)) // 2
        angles = torch.tensor([position * rope["rope_theta"] ** (-i / half) for i in range(half)])
        first, second, rest = states[..., :half], states[..., half : 2 * half], states[..., 2 * half :]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def fuse(self, features, carried):
        states = self.linear("fc", features)
        if carried and self.config.carry:
            states = states + self.weights["carry_embedding"]
        return self.norm("hidden_norm", states)

    def keys_values(self, layer, states, positions):
        heads = (self.config.num_key_value_heads, self.config.head_dim)
        keys, values = [], []
        for state, position in zip(states, positions, strict=True):
            key = self.norm(f"{layer}.k_norm", self.linear(f"{layer}.k_proj", state).view(heads))
            keys.append(self.rotate(key, position))
            values.append(self.linear(f"{layer}.v_proj", state).view(heads))
        return keys, values

    def attend(self, index, states, positions, context, context_positions):
        """Attention of the block rows, one query head at a time."""
        layer, config = f"layers.{index}.self_attn", self.config
        keys, values = self.keys_values(layer, [*context, *states], [*context_positions, *positions])
        key_positions = [*context_positions, *positions]
        group = config.num_attention_heads // config.num_key_value_heads
        sliding = config.layer_types[index] == "sliding_attention"
        rows = []

        def near(i, p, position):
            if config.sliding_window_from == "anchor":
                return i >= len(context) or p >= positions[0] - config.sliding_window
            return p > position - config.sliding_window

        for state, position in zip(states, positions, strict=True):
            query = self.linear(f"{layer}.q_proj", state).view(config.num_attention_heads, config.head_dim)
            query = self.rotate(self.norm(f"{layer}.q_norm", query), position)
            seen = [i for i, p in enumerate(key_positions) if not sliding or near(i, p, position)]
            if config.block_attention == "causal" or (sliding and config.block_attention == "causal_sliding"):
                seen = [i for i in seen if i < len(context) or key_positions[i] <= position]
            heads = []
            for head in range(config.num_attention_heads):
                scores = torch.stack([query[head] @ keys[i][head // group] for i in seen]) / math.sqrt(config.head_dim)
                chances = scores.softmax(dim=0)
                heads.append(sum(chances[n] * values[i][head // group] for n, i in enumerate(seen)))
            rows.append(self.linear(f"{layer}.o_proj", torch.cat(heads)))
        return torch.stack(rows)

    def look_up(self, text):
        """The tokens after the last earlier place of the longest suffix of `text`, and the suffix's length."""
        for size in range(self.config.lookup_ngram_size, 0, -1):
            for end in range(len(text) - 1, size - 1, -1):
                if text[end - size : end] == text[len(text) - size :]:
                    longer = list(text)
                    while len(longer) < len(text) + self.config.block_size:
                        longer.append(longer[end + len(longer) - len(text)])
                    return longer[len(text) :], size
        return [], 0

    def draft(self, text, context, context_positions, predicted=()):
        """
        Base logits `(B, draft vocabulary)` of the block at the end of `text`, given fused context rows, and what the
        target `predicted` behind the rejected rows.
        """
        config, anchor, anchor_token = self.config, len(text) - 1, text[-1]
        if config.mask_token_id is None:
            mask = self.weights["mask_embedding"]
        else:
            mask = self.embedding(config.mask_token_id)
        rows = config.block_size if config.anchor_first else config.block_size + 1
        states = [self.embedding(anchor_token)] + [mask] * (rows - 1)
        looked_up, size = self.look_up(text)
        for k, token in enumerate(looked_up, start=rows - config.block_size):
            hint = self.embedding(token) * self.weights["lookup_scale"] + self.weights["lookup_embedding"][size - 1]
            states[k] = states[k] + hint
        states = torch.stack(states)
        if "embed_proj.weight" in self.weights:
            states = self.linear("embed_proj", states)
        positions = list(range(anchor, anchor + rows))
        for i in range(config.num_hidden_layers):
            normed = self.norm(f"layers.{i}.input_layernorm", states)
            states = states + self.attend(i, normed, positions, context, context_positions)
            normed = self.norm(f"layers.{i}.post_attention_layernorm", states)
            gate = torch.nn.functional.silu(self.linear(f"layers.{i}.mlp.gate_proj", normed))
            up = self.linear(f"layers.{i}.mlp.up_proj", normed)
            states = states + self.linear(f"layers.{i}.mlp.down_proj", gate * up)
        states = self.norm("norm", states)
        if not config.anchor_first:  # the anchor row predicts nothing
            states = states[1:]
        if "head_proj.weight" in self.weights:
            states = self.linear("head_proj", states)
        head = self.own_head if self.own_head is not None else self.head.weight.detach()[self.vocabulary]
        pointed = list(states)
        gates = [] if not looked_up else [(self.weights["lookup_gate"][size - 1].expand(len(states), -1), looked_up)]
        if config.carry_pointer:
            gates.append((self.weights["carry_gate"], predicted))
        for gate, tokens in gates:
            for k, token in enumerate(tokens):
                if token in self.vocabulary:
                    row = head[self.vocabulary.index(token)]
                    pointed[k] = pointed[k] + (gate[k] @ states[k]) * row / (row @ row)
        states = torch.stack(pointed)
        logits = states @ head.T
        if self.own_head is None:
            logits = logits if self.head.bias is None else logits + self.head.bias.detach()[self.vocabulary]
        logits = logits * config.logit_scale
        if config.logit_softcapping is not None:
            logits = config.logit_softcapping * (logits / config.logit_softcapping).tanh()
        return logits

    def markov(self, previous):
        if not self.config.markov_rank:
            return 0.0
        return self.weights["markov_head.markov_w2.weight"] @ self.weights["markov_head.markov_w1.weight"][previous]

    def propose(self, logits, anchor_token):
        proposals, previous = [], anchor_token
        for row in logits:
            previous = self.vocabulary[int((row + self.markov(previous)).argmax())]
            proposals.append(previous)
        return proposals

    # One anchor

    def context(self, tokens, anchor):
        """Fused features of the recorded positions in front of `anchor`."""
        return list(self.fuse(self.run_target(tokens[:anchor])[0], carried=False)) if anchor else []

    @torch.no_grad()
    def first_proposals(self, tokens, anchor):
        logits = self.draft(tokens[: anchor + 1], self.context(tokens, anchor), list(range(anchor)))
        return self.propose(logits, tokens[anchor])

    def block(self, tokens, mask, first_anchor):
        """The [`ReferenceBlock`] of one anchor of an unpadded recording, or `None` when it has no label."""

        def exists(position):
            between = range(first_anchor + 1, position + 1)
            return position < len(tokens) and all(mask[p] for p in between)

        size, proposals, accepted, states, predicted = self.config.block_size, [], 0, None, []
        anchor, carried, carried_positions = first_anchor, None, []
        if self.first_draft:
            proposals = self.first_proposals(tokens, first_anchor)
            states, scores = self.run_target([*tokens[:first_anchor], tokens[first_anchor], *proposals])
            states = states[first_anchor:]
            for proposal in proposals:
                place = first_anchor + accepted + 1
                if not exists(place) or tokens[place] != proposal:
                    break
                accepted += 1
            anchor = first_anchor + accepted + 1
            predicted = scores[anchor:].argmax(dim=-1).tolist()
            carried, carried_positions = states[accepted + 1 :], list(range(anchor, first_anchor + size + 1))
        if not exists(anchor + 1):
            return None
        context, positions = self.context(tokens, anchor), list(range(anchor))
        if self.first_draft and self.config.carry:
            context += list(self.fuse(carried, carried=True))
            positions += carried_positions
        logits = self.draft(tokens[: anchor + 1], context, positions, predicted)
        losses = self.losses(tokens, anchor, logits, exists)
        second = self.propose(logits, tokens[anchor])
        judged = sum(exists(anchor + k) for k in range(1, size + 1))
        right = 0
        while right < judged and second[right] == tokens[anchor + right + 1]:
            right += 1
        branch = (proposals, accepted, states, carried_positions, carried)
        return ReferenceBlock(first_anchor, anchor, *branch, losses, second, right, judged)

    def losses(self, tokens, anchor, logits, exists):
        losses = []
        for k in range(1, self.config.block_size + 1):
            place = anchor + k
            if not exists(place) or tokens[place] not in self.vocabulary:
                losses.append(torch.zeros(()))
                continue
            log_q = (logits[k - 1] + self.markov(tokens[place - 1])).log_softmax(dim=-1)
            loss = -self.alpha_ce * log_q[self.vocabulary.index(tokens[place])]
            if self.alpha_tv:
                p = self.run_target(tokens[:place])[1][-1].softmax(dim=-1)
                q = torch.zeros_like(p).index_put((torch.tensor(self.vocabulary),), log_q.exp())
                loss = loss + self.alpha_tv * 0.5 * (p - q).abs().sum()
            losses.append(math.exp(-(k - 1) / self.gamma) * loss)
        return torch.stack(losses)


def scripted_recording(reference, prompt, accepted, mask_after=None, seed=0):
    """
    A recording at whose anchors the first draft is right for known lengths: after the prompt, for each `m` in
    `accepted`, `m` tokens that the drafter proposes there and one that it does not.

    Args:
        reference ([`SlowReference`]): Of the pair.
        prompt (`list[int]`): Its tokens.
        accepted (`list[int]`): The lengths.
        mask_after (`int`, *optional*): After so many of them come 3 tokens of a template: a second turn.

    Returns:
        `tuple[list[int], list[int], dict[int, int]]`: tokens, response mask, and `m` by anchor position.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, mask, anchors = list(prompt), [0] * len(prompt), {}
    for index, count in enumerate(accepted):
        if index == mask_after:
            tokens += torch.randint(2, 60, (3,), generator=generator).tolist()
            mask += [0] * 3
        anchor = len(tokens) - 1
        # Proposals depend on what is in front of the anchor alone, so they are known before the tokens are.
        proposals = reference.first_proposals(tokens, anchor)
        anchors[anchor] = count
        tokens += proposals[:count]
        wrong = int(torch.randint(2, 60, (1,), generator=generator))
        if count < len(proposals) and wrong == proposals[count]:
            wrong = 2 + (wrong - 1) % 58
        tokens.append(wrong)
        mask += [1] * (count + 1)
    return tokens, mask, anchors


__all__ = ["ReferenceBlock", "SlowReference", "scripted_recording"]
