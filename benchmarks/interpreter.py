"""Triton's interpreter, mended: it runs with any NumPy, and in little more than half the time.

For processes of their own, in which ``TRITON_INTERPRET=1`` was set before Triton was imported: the
tests' cases, and the counts of bytes and launches (`benchmarks.launches`).
"""

from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter


def mend() -> None:
    """Replace two functions of the interpreter for the rest of the process.

    A scalar is an array of shape (1,) there, of which int() fails with NumPy >= 2.4. And each
    function that a kernel calls makes the interpreter look through all names of Triton's language,
    to replace what is replaced already: that is done once in a launch for each module here.
    """
    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    run = interpreter.GridExecutor.__call__
    patched: set[int] = set()  # modules with a function that ran in this launch

    def patch_tensor_for_numpy_2(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def patch_language_once(function: Callable) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return None  # only the kernel's own, which is the first, is asked for
        patched.add(module)
        return patch_language(function)

    def run_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        run(self, *args, **kwargs)

    interpreter._patch_lang_tensor = patch_tensor_for_numpy_2
    interpreter._patch_lang = patch_language_once
    interpreter.GridExecutor.__call__ = run_anew
