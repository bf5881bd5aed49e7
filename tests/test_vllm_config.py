"""What the vLLM plugin reads from a drafter's config; needs no vLLM."""

import pytest

from hf_carryover import CarryoverConfig
from hf_carryover.vllm.config import adapt_config, refuse_unsupported


SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_target_layers": 4,
    "target_layer_ids": [0, 2],
}


def test_the_keys_vllm_reads_are_added():
    config = adapt_config(CarryoverConfig(**SHAPE, mask_token_id=7))
    assert config.dflash_config == {"target_layer_ids": [0, 2], "mask_token_id": 7, "causal": False}
    assert config.architectures == ["CarryoverDrafter"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"anchor_first": True}, "`anchor_first` is True; in vLLM only False is supported"),
        ({"own_head": True}, "`own_head` is True; in vLLM only False"),
        ({"logit_scale": 0.5}, "`logit_scale` is 0.5; in vLLM only 1.0"),
        ({"logit_softcapping": 30.0}, "`logit_softcapping` is 30.0; in vLLM only None"),
        ({"embedding_scale": 2.0}, "`embedding_scale` is 2.0; in vLLM only None"),
        ({"block_attention": "causal"}, "`block_attention` is 'causal'; in vLLM only 'bidirectional'"),
    ],
)
def test_what_converted_drafters_bring_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(CarryoverConfig(**SHAPE, **values))
