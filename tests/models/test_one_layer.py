"""A stock model of which one layer at a time has weights."""

import pytest
import torch

import tiny
from slimstate.checkpoints.reader import Checkpoint
from slimstate.models.load import load
from slimstate.models.one_layer import OneLayerModel

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", sorted(tiny.EVERY_PLAIN))
def test_layer_after_layer_gives_what_the_whole_model_gives_to_the_last_bit(name, folders):
    """With renamed, joined and shared tensors, masks, rotary embeddings and multipliers, whatever the family has."""
    checkpoint, whole, ids = Checkpoint.open(folders[name]), load(folders[name], device="cpu").model, tiny.token_ids()
    model = OneLayerModel(checkpoint, checkpoint.config, torch.device("cpu"), torch.float32)
    expected: dict[int, torch.Tensor] = {}
    for number in range(model.layers):
        whole.get_submodule(model.path_of(number)).register_forward_hook(
            lambda _, __, output, number=number: expected.__setitem__(
                number, output[0] if isinstance(output, tuple) else output
            )
        )
    with torch.no_grad():
        whole.base_model(input_ids=ids, use_cache=False)
        known, places = ids.unique(return_inverse=True)
        embedded = model.embed(checkpoint.stored(model.embedding_name()).rows(known))[places]
        states = model.first_states(embedded)
        for number in range(model.layers):
            stored = {name: checkpoint.stored(name) for name in model.stored_names(checkpoint, number)}
            with model.with_weights(number, model.convert(number, stored)):
                states = model.forward(number, states, embedded)
            assert torch.equal(states, expected[number])
            assert all(weight.is_meta for weight in model.model.parameters())
