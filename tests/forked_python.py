"""A Python that starts in a tenth of a second, for tests of scripts in processes of their own.

Most of what such a test takes is the import of torch and of what hosts import beside it. One server
imports these once; `Server.python` is an executable that is called as ``python`` is and hands its
arguments, folder, environment and open files to the server, whose fork does the rest. Scripts that
start others by ``sys.executable``, as launchers do, start these likewise. There are two:

* With `MODULES` imported, and none of what is under test: the hosts, the entry points that are
  extended in them, and this package are imported by each script, with the hooks that
  ``import torch`` has left.
* With `HOSTS` as well, and this package, as in a program that has imported everything before it
  asks for FP8. For scripts whose test is of what they train.

Where the caller's environment says ``TEST_BF16_PRODUCTS=float32``, a script computes BF16 products
in float32, as the tests do on a CPU without fast ones.

With the autoload switched off the first one forgets this package's hooks. A test of the start
itself (modules that are hidden, other flags of Python) takes the real Python.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import importlib.util
import marshal
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Sequence
from pathlib import Path

MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "torchmetrics",
    "tokenizers",
)
PACKAGES_UNDER_TEST = ("lightning", "lightning_fabric", "pytorch_lightning", "accelerate", "trl")
EXTENDED = tuple(
    f"transformers.{name}"
    for name in ("generation.utils", "modeling_utils", "training_args", "trainer")
)
HOSTS = (
    *MODULES,
    "torch._inductor.compile_fx",  # every torch.compile imports it, whatever its backend
    "accelerate",
    "datasets",
    "lightning.pytorch",
    "peft",
    "torch.distributed.tensor.experimental",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.trainer",
    "trl.trainer.sft_trainer",
    "torch_fp8",
    "accelerate_fp8.accelerator",
    "lightning_fp8.precision",
)
BF16_PRODUCTS = Path(__file__).parents[1] / "torch_fp8_tools/compare/bf16_products.py"
"""The module for CPUs without fast BF16 products, loaded by path: its package is under test."""
RARE_COLLECTIONS = (700, 10, 100)
"""Of garbage. Python's own thresholds take a fifth of the time of an import as large as torch's."""
ENGINE = ("torch_fp8", "torch_fp8_tools", "lightning_fp8", "accelerate_fp8")

CLIENT = """#!{python} -ISE
import marshal, os, signal, socket, sys
endings = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
ignored = [int(number) for number in endings if signal.getsignal(number) == signal.SIG_IGN]
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
def is_open(name):
    try:
        return int(name) != connection.fileno() and os.get_inheritable(int(name))
    except OSError:
        return False
files = [int(name) for name in os.listdir("/proc/self/fd") if is_open(name)]
request = marshal.dumps((sys.argv[1:], os.getcwd(), dict(os.environ), files, ignored))
socket.send_fds(connection, [len(request).to_bytes(8, "little")], files)
connection.sendall(request)
pid = int.from_bytes(connection.recv(8), "little")
def forward(number, frame):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, forward)
code = os.waitstatus_to_exitcode(int.from_bytes(connection.recv(8), "little"))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class Server:
    """Starts the process that is forked, in `folder`; `stop` ends it and what it has started.

    Args:
        modules: what it imports.
    Attributes:
        python: path of the executable.
        pid: the server's.
    """

    def __init__(self, folder: Path, modules: Sequence[str] = MODULES) -> None:
        address = str(folder / "socket")
        self.python = str(folder / "python")
        Path(self.python).write_text(CLIENT.format(python=sys.executable, address=address))
        Path(self.python).chmod(0o755)
        chosen = ("PYTHONPATH", "ACCELERATE_", "TORCH_", "PL_", "LT_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(chosen)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, address, self.python, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **kept,
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "HF_HOME": str(folder / "hf_home"),
                "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's allocator
            },
        )
        self.pid = self._process.pid
        assert self._process.stdout.readline() == b"ready\n"

    def processor_seconds(self) -> float:
        """Of what it has forked and waited for, and of what that has started."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)


def serve(address: str, python: str, *modules: str) -> None:
    """Forks for each request; returns in the child, which runs what was asked for."""
    gc.set_threshold(*RARE_COLLECTIONS)
    del sys.path[0]  # the folder of this file
    _import_in_silence(modules)
    seed_the_cpu_alone()
    bf16_products()
    if not set(modules) > set(MODULES):
        loaded = {name.partition(".")[0] for name in sys.modules}
        assert not loaded.intersection(PACKAGES_UNDER_TEST + ENGINE), loaded
        assert not set(EXTENDED) & set(sys.modules)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    gc.collect()
    os.write(1, b"ready\n")
    while True:
        ready, _, _ = select.select([0, woken, listener, *running.values()], [], [])
        if 0 in ready:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            _report(running)
        # Whoever asked is gone, killed perhaps: what it asked for goes with it.
        for pid, connection in running.items():
            if connection in ready:
                os.kill(pid, signal.SIGKILL)
        if listener in ready:
            connection, _ = listener.accept()
            request, files = _receive(connection)
            if request is None:
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(woken)
                os.close(wake)
                for other in (listener, connection, *running.values()):
                    other.close()
                _become(*request, files, python)
                return
            for file in files:
                os.close(file)
            running[pid] = connection
            with contextlib.suppress(OSError):
                connection.sendall(pid.to_bytes(8, "little"))


def seed_the_cpu_alone() -> None:
    """Where no card is, `torch.manual_seed` keeps the call for one, with the caller's stack.

    That takes a millisecond for each of three kinds of cards, and thousands of tests seed.
    """
    import torch

    if not torch.accelerator.is_available():
        for module in (torch.cuda.random, torch.xpu.random, torch.mtia):
            module._lazy_call = lambda call, **options: None


def bf16_products() -> types.ModuleType:
    """Return `torch_fp8_tools/compare/bf16_products.py`, without its package."""
    name = BF16_PRODUCTS.stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, BF16_PRODUCTS)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _import_in_silence(modules: Sequence[str]) -> None:
    """What libraries write to standard error when imported is shown if one fails."""
    error = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            for name in modules:
                importlib.import_module(name)
        except BaseException:
            said.seek(0)
            os.write(error, said.read())
            raise
        finally:
            os.dup2(error, 2)
            os.close(error)


def _report(running: dict[int, socket.socket]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        connection = running.pop(pid)
        with contextlib.suppress(OSError):
            connection.sendall(status.to_bytes(8, "little"))
        connection.close()


def _receive(connection: socket.socket):
    length, files, _, _ = socket.recv_fds(connection, 8, 64)
    data = b""
    while length and len(data) < int.from_bytes(length, "little"):
        part = connection.recv(1 << 16)
        if not part:
            break
        data += part
    if not data:
        return None, files
    return marshal.loads(data), files


def _become(arguments, folder, environment, numbers, ignored, files, python) -> None:
    """What a new Python has of its caller."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    above = max(numbers, default=0) + 1
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for file in files:
        os.close(file)
    for number, copy in zip(numbers, copies, strict=True):
        os.dup2(copy, number)
        os.close(copy)
    for name, number in (("stdout", 1), ("stderr", 2)):  # the server's may be files, these pipes
        old = getattr(sys, name)
        new = open(number, "w", encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        new.reconfigure(line_buffering=number == 2)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = python
    multiprocessing.set_executable(python)
    sys.orig_argv = [python, *arguments]
    sys.argv = arguments
    sys.path[:0] = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]
    importlib.invalidate_caches()
    if environment.get("TEST_BF16_PRODUCTS") == "float32":
        bf16_products().compute_in_float32()
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        _forget_autoload()
    else:  # as `import torch` ends, in this environment
        sys.modules["torch"]._import_device_backends()
    if "lightning_utilities.core.rank_zero" in sys.modules:  # it asks for its rank when imported
        rank = environment.get("RANK") or environment.get("LOCAL_RANK") or 0
        sys.modules["lightning_utilities.core.rank_zero"].rank_zero_only.rank = int(rank)
    if any((Path(p) / "sitecustomize.py").exists() for p in sys.path[:3]):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


def _forget_autoload() -> None:
    """Leave nothing of what ``import torch`` has loaded of this package."""
    assert not {name.partition(".")[0] for name in sys.modules}.intersection(ENGINE)
    sys.meta_path.remove(sys.modules["_fp8_autoload"]._finder)
    for name in [name for name in sys.modules if name.startswith("_fp8_")]:
        del sys.modules[name]


def run_and_exit() -> None:
    """As Python ends, but for the clearing of all modules: that takes longer than most scripts."""
    code = 0
    try:
        run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        code = -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    # A script may have put others in the places of the first two.
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def run() -> None:
    """``python [flags] script | -m module | -c code``, in a ``__main__`` of its own."""
    arguments = sys.argv
    while arguments[0] in ("-u", "-W", "-B", "-s"):
        flag = arguments.pop(0)
        if flag == "-W":
            warnings.simplefilter(arguments.pop(0))
        elif flag == "-u":
            sys.stdout.reconfigure(line_buffering=True)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    if arguments[0] == "-m":
        name = arguments.pop(0) and arguments[0]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(name, alter_argv=True)
    elif arguments[0] == "-c":
        code = arguments.pop(1)
        sys.path.insert(0, "")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    else:
        script = Path(arguments[0])
        sys.path.insert(0, str(script.resolve().parent))
        main.__file__, main.__spec__ = str(script), None
        exec(compile(script.read_bytes(), str(script), "exec"), main.__dict__)


if __name__ == "__main__":
    serve(*sys.argv[1:])
    run_and_exit()
