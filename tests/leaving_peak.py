"""Memory of a model that becomes a stock one."""

from unittest import mock

from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tests.fp8_checkpoints import LiveStorages
from tests.internals import block_scaled, local, stored_grad


def check_peak_of_leaving(model, leave, biggest):
    """Check that `leave` never holds more than the stock model and its biggest weight.

    Args:
        model: converted, with or without gradients.
        leave: makes it a stock model.
        biggest: bytes of the biggest weight as it is afterwards.
    """
    # What is decoded at a time is small beside these weights, as beside those of real models.
    parts = mock.patch.object(block_scaled, "_ENCODE_ROWS", biggest // 256)
    with parts, LiveStorages() as live:
        for tensor in _stored(model):
            tensor.detach()
        del tensor
        before = live.alive
        leave()
    storages = [x.untyped_storage() for x in _stored(model)]
    after = sum({s._cdata: s.nbytes() for s in storages}.values())
    assert before < after <= live.peak <= after + biggest


def _stored(model):
    """The plain tensors that are in memory for weights and gradients."""
    values = [x for p in model.parameters() for x in (p, stored_grad(p)) if x is not None]
    for value in map(local, values):
        parts = value.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(value) else ()
        yield from [getattr(value, part) for part in parts] or [value]
