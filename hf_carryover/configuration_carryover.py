# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Configuration of a Carryover drafter. Self-contained: it is copied beside the weights by `save_pretrained`."""

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def default_target_layer_ids(num_target_layers: int, num_features: int = 5) -> list[int]:
    """
    Evenly spaced target layers, from the second to the third last, as DFlash chooses them.

    Args:
        num_target_layers (`int`):
            Number of decoder layers of the target.
        num_features (`int`, *optional*, defaults to 5):
            How many layers to tap. Fewer are returned when the target has fewer distinct candidates.

    Returns:
        `list[int]`: Increasing 0-based layer ids; id `k` means the output of decoder layer `k`.

    Raises:
        ValueError: If one of the numbers is below 1.
    """
    for name, value in (("num_target_layers", num_target_layers), ("num_features", num_features)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    first, last = min(1, num_target_layers - 1), max(num_target_layers - 3, min(1, num_target_layers - 1))
    steps = max(num_features - 1, 1)
    return sorted({round(first + (last - first) * i / steps) for i in range(num_features)})


# What a carried row can be made of, and for each whether the target's states are part of it.
CARRY_SOURCES = {"states": True, "predictions": False, "proposals": False, "states_and_predictions": True}

# Longest suffix of the text that may be looked up; each length has an embedding of its own.
MAX_LOOKUP_NGRAM = 64

# Who sees whom among the rows of a block.
BLOCK_ATTENTION = ("bidirectional", "causal_sliding", "causal")

# Numbers that must be at least 1 where they are set, and the most that is believed: a model is built from them before
# any weight is read, so a damaged file must not ask for a billion layers.
_SIZES = {
    "block_size": 2**14,
    "vocab_size": 2**26,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "max_position_embeddings": 2**40,
    "target_hidden_size": 2**20,
    "num_target_layers": 2**14,
    "sliding_window": 2**40,
}

# What a configuration file may not decide: they make transformers import or download code, look for the weights in
# another file, or give layers other sizes. An attention implementation is for whoever loads a drafter to choose.
_NOT_FROM_FILES = (
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
    "transformers_weights",
    "per_layer_config",
)


@strict
class CarryoverConfig(PreTrainedConfig):
    r"""
    Configuration of a [`CarryoverDrafter`]: a DFlash block drafter (arXiv 2602.06036) that may read the target's
    hidden states of the rejected rows of the round before (arXiv 2609.14717).

    Args:
        vocab_size (`int`, *optional*, defaults to 151936):
            Vocabulary of the target. Embedding and output head are the target's and are never part of the drafter.
        target_hidden_size (`int`, *optional*, defaults to `hidden_size`):
            Hidden size of the target. When it differs from `hidden_size`, two linear maps join the widths.
        num_target_layers (`int`, *optional*, defaults to 36):
            Number of decoder layers of the target. `None` where a converted checkpoint does not say; then
            `target_layer_ids` are required, and only they are checked against the target.
        target_layer_ids (`list[int]`, *optional*):
            Target layers whose outputs are the features. Id `k` is the output of decoder layer `k` (0-based), which
            transformers calls `hidden_states[k + 1]`; for the last layer that entry is taken after the final norm.
            Defaults to [`default_target_layer_ids`].
        block_size (`int`, *optional*, defaults to 15):
            Proposals per round, `B`. A block has `B + 1` rows: the anchor and `B` mask rows. (z-lab's DFlash counts
            the anchor row in its `block_size`.)
        anchor_first (`bool`, *optional*, defaults to `False`):
            The layout of a block. `False`: mask row `k` sits at position `a + k` and predicts that position's token.
            `True` (DSpark): `B` rows, the anchor and `B - 1` masks; row `k` at position `a + k` predicts the token
            behind it, so the anchor row gives the first proposal.
        mask_token_id (`int`, *optional*):
            Token whose target embedding fills the mask rows. `None` gives the drafter a learned mask embedding.
        carry (`bool`, *optional*, defaults to `True`):
            Whether rejected rows are handed to the next round. `False` is the plain DFlash or Markov drafter.
        carry_from (`str`, *optional*, defaults to `"states"`):
            What a carried row is made of: `"states"`, the target's (arXiv 2609.14717); `"predictions"`, the target's
            likeliest next token there; `"proposals"`, the rejected token itself; `"states_and_predictions"`, both of
            the target's. Tokens enter through the target's embedding and one linear map.
        carry_pointer (`bool`, *optional*, defaults to `False`):
            Whether the target's likeliest next tokens at the rejected rows are also pointed at directly, in the logits
            of the positions they are for; see [`CarryoverDrafter.point`].
        lookup_ngram_size (`int`, *optional*, defaults to 0):
            Longest ending of the text, in tokens, whose last earlier occurrence is looked up; the tokens behind it
            come into the block as embeddings, see [`~hf_carryover.lookup.look_up`]. 0 looks nothing up.
        markov_rank (`int`, *optional*, defaults to 0):
            Rank `r` of the Markov head, `logits_k += W2 · W1[y_{k-1}]`. 0 samples every position independently.
        draft_vocab_size (`int`, *optional*):
            Size of a reduced draft vocabulary. The map is the buffer `d2t` (offsets: target id = draft id +
            `d2t[draft id]`); its head rows are gathered from the target's head. `None` drafts over all tokens.
        own_head (`bool`, *optional*, defaults to `False`):
            Whether the drafter brings an output head of its own, the frozen buffer `head_weight`, which then stands in
            for the target's.
        logit_scale (`float`, *optional*, defaults to 1.0), logit_softcapping (`float`, *optional*):
            What the head's logits are multiplied with, and the bound `c` of `c · tanh(logits / c)` they then go
            through, before any Markov bias.
        embedding_scale (`float`, *optional*):
            `None` takes anchor and mask embeddings as the target's embedding module gives them; a number takes the
            rows of its weight times that number (Gemma's module scales and normalizes, DFlash was trained without).
        draft_sampling (`str`, *optional*, defaults to `"sample"`):
            How proposals are drawn when the target samples: `"sample"` from the draft distribution, or `"argmax"`,
            the likeliest token with a one-point draft distribution. Both are lossless.
        layer_types (`list[str]`, *optional*):
            `"full_attention"` or `"sliding_attention"` for each drafter layer. Defaults to full attention.
        sliding_window (`int`, *optional*):
            Window of the sliding layers, in positions: a query at `p` sees keys at positions above `p - window`.
        sliding_window_from (`str`, *optional*, defaults to `"query"`):
            `"query"` counts the window from each row; `"anchor"` (speculators) lets all rows see the block and the
            keys from `a - window` on.
        block_attention (`str`, *optional*, defaults to `"bidirectional"`):
            Whether rows of a block see later rows of it: `"bidirectional"` in all layers, `"causal_sliding"` not in
            sliding layers, `"causal"` in none. Committed and carried rows are not concerned.
        rope_parameters (`dict`, *optional*):
            RoPE parameters of the drafter, one set for all layers and independent of the target's. Defaults to plain
            RoPE with `rope_theta` 1000000. `partial_rotary_factor` rotates only the first part of each head.
        converted_from (`dict`, *optional*):
            Of a converted drafter: the `format` it was read from and that format's own `config`, which
            [`convert_drafter`] writes back.

    The other arguments (`hidden_size`, `intermediate_size`, `num_hidden_layers`, `num_attention_heads`,
    `num_key_value_heads`, `head_dim`, `hidden_act`, `rms_norm_eps`, `attention_bias`, ...) are those of Qwen3.

    Raises:
        ValueError: If a value is out of range or two values contradict each other.

    Example:

    ```python
    >>> from hf_carryover import CarryoverConfig, CarryoverDrafter

    >>> config = CarryoverConfig(vocab_size=49152, hidden_size=576, num_target_layers=30, block_size=7)
    >>> drafter = CarryoverDrafter(config)
    ```
    """

    model_type = "carryover"
    default_theta = 1000000.0

    vocab_size: int = 151936
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    sliding_window_from: str = "query"
    block_attention: str = "bidirectional"

    target_hidden_size: int | None = None
    num_target_layers: int | None = 36
    target_layer_ids: list[int] | None = None
    block_size: int = 15
    anchor_first: bool = False
    mask_token_id: int | None = None
    carry: bool = True
    carry_from: str = "states"
    carry_pointer: bool = False
    lookup_ngram_size: int = 0
    markov_rank: int = 0
    draft_vocab_size: int | None = None
    own_head: bool = False
    logit_scale: float = 1.0
    logit_softcapping: float | None = None
    embedding_scale: float | None = None
    draft_sampling: str = "sample"
    converted_from: dict | None = None

    def __post_init__(self, **kwargs):
        self._check_sizes()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.target_layer_ids is None:
            if self.num_target_layers is None:
                raise ValueError("`target_layer_ids` are required where `num_target_layers` is None.")
            self.target_layer_ids = default_target_layer_ids(self.num_target_layers)
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        super().__post_init__(**kwargs)
        self.check_values()

    @property
    def block_rows(self) -> int:
        """Rows of a block: the anchor and its masks."""
        return self.block_size if self.anchor_first else self.block_size + 1

    @property
    def feature_size(self) -> int:
        """Width of one row of target features, `len(target_layer_ids) * target_hidden_size`."""
        return len(self.target_layer_ids) * self.target_hidden_size

    @property
    def output_vocab_size(self) -> int:
        """Number of tokens the drafter can propose."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def carries_states(self) -> bool:
        """Whether carried rows hold the target's states."""
        return self.carry and CARRY_SOURCES[self.carry_from]

    @property
    def points_at_carried(self) -> bool:
        """Whether the target's predictions behind carried rows are pointed at."""
        return self.carry and self.carry_pointer

    @property
    def carried_token(self) -> str | None:
        """The token whose embedding a carried row holds: `"prediction"`, `"proposal"`, or `None`."""
        if not self.carry or self.carry_from == "states":
            return None
        return "proposal" if self.carry_from == "proposals" else "prediction"

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """
        Like the parent, but overrides (`from_pretrained(folder, carry=True)`) are checked with all other values.

        Raises:
            ValueError: Also when the file lacks `target_layer_ids`, for which no default may stand in (another one has
                the same number of layers and not the same layers), is of another kind of model, or names code to run.
        """
        overrides = {name: kwargs.pop(name) for name in list(kwargs) if name in cls.__annotations__}
        config_dict = {**config_dict, **overrides}
        if config_dict.get("model_type", cls.model_type) != cls.model_type:
            raise ValueError(
                f"The configuration is of a {config_dict['model_type']!r} model, not of a Carryover drafter, whose "
                f"`model_type` is {cls.model_type!r}."
            )
        if config_dict.get("target_layer_ids") is None:
            raise ValueError(
                "The drafter's configuration has no `target_layer_ids`, so the target layers it reads are unknown. "
                "Give those it was trained with: `from_pretrained(..., target_layer_ids=[...])`."
            )
        refused = [name for name in _NOT_FROM_FILES if config_dict.get(name) is not None]
        if refused:
            values = ", ".join(f"`{name}` is {config_dict[name]!r}" for name in refused)
            raise ValueError(
                f"The drafter's configuration holds what a file may not decide: {values}. Remove it; an attention "
                "implementation is an argument of `from_pretrained`."
            )
        return super().from_dict(config_dict, **kwargs)

    def check_values(self) -> None:
        """Raise a `ValueError` that names the first value which is out of range, and what was expected."""
        self._check_sizes()
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads})."
            )
        self._check_layer_ids()
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` must lie in 0 ... {self.vocab_size - 1}, got {self.mask_token_id}. Use an unused "
                "token of the target, or `mask_token_id=None` for a learned mask embedding."
            )
        if self.markov_rank < 0:
            raise ValueError(f"`markov_rank` must be 0 (no Markov head) or positive, got {self.markov_rank}.")
        if not 0 <= self.lookup_ngram_size <= MAX_LOOKUP_NGRAM:
            raise ValueError(
                f"`lookup_ngram_size` must lie in 0 (nothing is looked up) ... {MAX_LOOKUP_NGRAM}, got "
                f"{self.lookup_ngram_size}."
            )
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` must lie in 1 ... {self.vocab_size} (`vocab_size`), got {self.draft_vocab_size}."
            )
        if self.draft_sampling not in ("sample", "argmax"):
            raise ValueError(f'`draft_sampling` must be "sample" or "argmax", got {self.draft_sampling!r}.')
        self._check_logits()
        if self.carry_from not in CARRY_SOURCES:
            raise ValueError(f"`carry_from` must be one of {', '.join(CARRY_SOURCES)}, got {self.carry_from!r}.")
        unknown = set(self.layer_types) - {"full_attention", "sliding_attention"}
        if unknown or len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                '`layer_types` needs "full_attention" or "sliding_attention" for each of the '
                f"{self.num_hidden_layers} layers, got {self.layer_types}."
            )
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError(
                "`sliding_window` must be positive when `layer_types` has sliding layers, got None. Give the window "
                'in positions, or use "full_attention".'
            )
        if self.sliding_window_from not in ("query", "anchor"):
            raise ValueError(f'`sliding_window_from` must be "query" or "anchor", got {self.sliding_window_from!r}.')
        if self.block_attention not in BLOCK_ATTENTION:
            known = ", ".join(BLOCK_ATTENTION)
            raise ValueError(f"`block_attention` must be one of {known}, got {self.block_attention!r}.")
        self._check_rope()

    def _check_layer_ids(self) -> None:
        ids, layers = self.target_layer_ids, self.num_target_layers
        low = not ids or min(ids) < 0 or sorted(set(ids)) != list(ids)
        if low or (layers is not None and ids[-1] >= layers):
            bound = "0 ..." if layers is None else f"0 ... {layers - 1} (`num_target_layers` is {layers})"
            raise ValueError(
                f"`target_layer_ids` must be distinct increasing ids in {bound}, got {ids}. Id k is the output of "
                "decoder layer k."
            )

    def _check_logits(self) -> None:
        for name in ("logit_scale", "logit_softcapping", "embedding_scale"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"`{name}` must be positive, got {value}.")

    def _check_sizes(self) -> None:
        """The numbers that everything else is computed from; those still unset are `None`."""
        for name, most in _SIZES.items():
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
            if value is not None and value > most:
                raise ValueError(f"`{name}` must be at most {most}, got {value}.")

    def _check_rope(self) -> None:
        rope = self.rope_parameters
        if "rope_type" not in rope:
            raise ValueError(
                "`rope_parameters` must be one set for all drafter layers, with `rope_type` and `rope_theta`, got "
                f"sets for {sorted(rope)}. Choose one of them."
            )
        known = sorted({"default", *ROPE_INIT_FUNCTIONS})
        if rope["rope_type"] not in known:
            raise ValueError(f"`rope_type` must be one of {known}, got {rope['rope_type']!r}.")
        if "dynamic" in rope["rope_type"] or rope["rope_type"] == "longrope":
            raise ValueError(
                f"`rope_type` {rope['rope_type']!r} lets the frequencies follow the length of the text, but the "
                "drafter's committed keys keep those they were written with. Use a type with fixed frequencies."
            )
        factor = rope.get("partial_rotary_factor", 1.0)
        if not 0 < factor <= 1:
            raise ValueError(f"`partial_rotary_factor` must be above 0 and at most 1, got {factor}.")


__all__ = ["CarryoverConfig", "default_target_layer_ids"]
