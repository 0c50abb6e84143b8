"""How the parity tests compare a model of ours with one of the transformers library."""

from collections.abc import Callable
from types import EllipsisType

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig
from models.families import FAMILIES
from models.initialize import normal
from models.units import Unit
from tests.models import tokens_of

# The reference's parameter that holds a unit, and the unit's part of it.
Place = tuple[str, int | slice | EllipsisType | tuple[int | slice, ...]]


def weight(unit: Unit) -> Tensor:
    """A random weight `[*unit.shape]` of a size at which every part of the layer matters."""
    if not unit.is_matrix:
        return 1 + 0.3 * normal(unit.name, (1, unit.numel), 0)[0]
    return normal(unit.name, unit.shape, 0) * 2 / unit.shape[1] ** 0.5


def compare(
    model: ModelConfig,
    theirs: torch.nn.Module,
    place: Callable[[Unit], Place],
    prepare: Callable[[torch.nn.Module], None] = lambda ours: None,
) -> None:
    """None; gives both models the same float32 weights and checks logits and all gradients.

    `prepare(ours)` sets what is no parameter.
    """
    family, layers = FAMILIES[model.family], range(model.layers)
    ours = family.build(
        model,
        family.transformer_config(model, dtype=torch.float32),
        layers=layers,
        embedding=True,
        head=True,
        sequence_length=24,
    )
    prepare(ours)
    names = family.parameter_names(ours, layers)
    parameters = {names[name]: parameter for name, parameter in ours.named_parameters()}
    their_parameters = dict(theirs.named_parameters())
    units = family.units(model, layers=layers)
    with torch.no_grad():
        for parameter in their_parameters.values():
            parameter.fill_(torch.nan)  # so that one that no unit fills is seen
        for unit in units:
            name, part = place(unit)
            unit.view(parameters[unit.parameter]).copy_(weight(unit).view(unit.axes))
            their_parameters[name][part] = weight(unit)

    tokens, labels = tokens_of(3, 24, model.vocab_size or 0)
    our_logits = ours(tokens, torch.zeros_like(tokens), None)
    their_logits = theirs(tokens).logits
    assert their_logits.std() > 0.5
    # The two round differently in float32; logits are of the order of one.
    assert (our_logits - their_logits).abs().max() < 1e-4

    for logits in (our_logits, their_logits):
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    for unit in units:
        name, part = place(unit)
        gradient = their_parameters[name].grad
        assert gradient is not None
        expected = gradient[part]
        found = unit.view(parameters[unit.parameter].grad).reshape(unit.shape)
        assert expected.norm() > 0, unit.name
        assert (found - expected).norm() < 1e-4 * expected.norm(), unit.name
