"""Layers of torch whose constructor or mode decides what their forward does in a capture."""

from __future__ import annotations

from collections.abc import Iterator

from graphlint.checks.base import Report, Walk, at, constant, on_device
from graphlint.flow import events as ev
from graphlint.flow.objects import as_base
from graphlint.flow.values import External, Host, Instance, Value

_NORMS = frozenset(
    {
        "BatchNorm1d",
        "BatchNorm2d",
        "BatchNorm3d",
        "SyncBatchNorm",
        "LazyBatchNorm1d",
        "LazyBatchNorm2d",
        "LazyBatchNorm3d",
    }
)
_DROPOUTS = frozenset({"Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout"})
_DROPS = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"})


def layer_of(event: ev.CallEvent) -> tuple[External | None, str]:
    """The module of torch whose forward this is, and its class name."""
    head, _, last = event.name.rpartition(".")
    if last != "forward" or not head.startswith("torch.nn.") or not isinstance(event.receiver, (External, Instance)):
        return None, ""
    layer = event.receiver if isinstance(event.receiver, External) else as_base(event.receiver, head)
    return layer, head.rpartition(".")[2]


def given(made: External | ev.CallEvent, index: int, name: str) -> Value | None:
    """An argument by position or name."""
    return made.args[index] if len(made.args) > index else made.keywords.get(name)


def is_none(value: Value | None) -> bool:
    return isinstance(value, Host) and value.kind == "none"


def trains(layer: External) -> bool:
    """Whether the layer is known to be in training mode."""
    return constant(layer.slots.get("training")) is True


def running_average(event: ev.CallEvent, walk: Walk) -> Iterator[Report]:
    """`BatchNorm(momentum=None)` divides by its counter of batches, which it reads on the host."""
    layer, name = layer_of(event)
    if layer is None or name not in _NORMS or not trains(layer):
        return
    shift = 1 if name.startswith("Lazy") else 0
    tracked = constant(given(layer, 4 - shift, "track_running_stats")) is not False
    if is_none(given(layer, 2 - shift, "momentum")) and tracked:
        yield at(
            event, "hidden-check", why="reads its counter of batches on the host, as it was made with `momentum=None`"
        )


def packed_encoder(event: ev.CallEvent, walk: Walk) -> Iterator[Report]:
    """`nn.TransformerEncoder` in evaluation asks whether its padding mask can become a nested tensor."""
    layer, name = layer_of(event)
    if layer is None or name != "TransformerEncoder" or constant(layer.slots.get("training")) is not False:
        return
    mask = given(event, 2, "src_key_padding_mask")
    if mask is None or on_device(mask) is None:
        return
    if (
        constant(given(layer, 3, "enable_nested_tensor")) is not False
        and constant(given(layer, 4, "mask_check")) is not False
        and _can_nest(given(layer, 0, "encoder_layer"))
    ):
        yield at(event, "hidden-check", why="looks at the padding mask on the host to pack the padding away")


def _can_nest(inner: Value | None) -> bool:
    """Whether the layer is of the kind that takes nested tensors, as far as its constructor says."""
    if not isinstance(inner, External) or inner.name != "torch.nn.TransformerEncoderLayer":
        return False
    heads = constant(given(inner, 1, "nhead"))
    activation = given(inner, 4, "activation")
    return (
        constant(given(inner, 6, "batch_first")) is True
        and constant(given(inner, 7, "norm_first")) in (None, False)
        and constant(given(inner, 8, "bias")) is not False
        and not (isinstance(heads, int) and heads % 2)
        and (activation is None or constant(activation) in ("relu", "gelu"))
    )


def averaged_model(event: ev.CallEvent, walk: Walk) -> Iterator[Report]:
    """`AveragedModel.update_parameters` tests its counter: on the GPU that waits, on the host the branch is frozen."""
    if event.name != "torch.optim.swa_utils.AveragedModel.update_parameters" or not isinstance(
        event.receiver, External
    ):
        return
    place = given(event.receiver, 1, "device")
    if place is None or is_none(place) or constant(place) == "cpu":
        yield at(event, "first-step-branch", value="its counter")
    elif str(constant(place)).startswith("cuda"):
        yield at(event, "hidden-check", why="tests its counter on the host")


def dropout_in_region(event: ev.CallEvent, walk: Walk) -> Iterator[Report]:
    """Dropout in training mode: fresh at every replay, its probability and mode are not."""
    head, _, last = event.name.rpartition(".")
    layer, name = layer_of(event)
    if layer is not None and name in _DROPOUTS and trains(layer):
        chance = given(layer, 0, "p")
    elif head in ("torch", "torch.nn.functional") and last in _DROPS and _asked_for(given(event, 2, "training")):
        chance = given(event, 1, "p")
    elif last == "scaled_dot_product_attention" and constant(given(event, 4, "dropout_p")):
        chance = given(event, 4, "dropout_p")
    else:
        return
    if constant(chance) != 0:
        yield at(event, "dropout-in-region")


def _asked_for(training: Value | None) -> bool:
    return training is None or constant(training) is True
