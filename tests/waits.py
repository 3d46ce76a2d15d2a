"""`Waits`: how often a program waits for the device."""

from torch.utils._python_dispatch import TorchDispatchMode


class Waits(TorchDispatchMode):
    """Counts the operators that wait for the device: they return numbers or decide sizes.

    Args:
        hosts: returns tensors that are the host's on a card, too.
    """

    NAMES = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "unique", "_unique2")

    def __init__(self, hosts=list):
        super().__init__()
        self.count, self._hosts = 0, hosts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.NAMES:
            self.count += all(args[0] is not tensor for tensor in self._hosts())
        return func(*args, **(kwargs or {}))
