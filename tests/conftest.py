"""Fixtures for all tests, and the environment they run in."""

import contextlib
import gc
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import _fp8_autoload
from tests import durations, transformer_engine_stub
from tests.durations import (  # noqa: F401  (hooks)
    pytest_collection_modifyitems,
    pytest_runtest_setup,
    pytest_runtest_teardown,
)
from tests.forked_python import (
    HOSTS,
    MODULES,
    RARE_COLLECTIONS,
    Server,
    bf16_products,
    seed_the_cpu_alone,
)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
gc.set_threshold(*RARE_COLLECTIONS)
seed_the_cpu_alone()
_fp8_autoload.load()  # torch finds the entry point of an installed package alone


def _compute_bf16_products():
    """Compute them as ``TEST_BF16_PRODUCTS`` says; none: in float32 on a CPU without fast ones."""
    products = bf16_products()
    if "TEST_BF16_PRODUCTS" not in os.environ:
        is_slow = products.slowness() >= products.SLOW
        os.environ["TEST_BF16_PRODUCTS"] = "float32" if is_slow else "bf16"
    if os.environ["TEST_BF16_PRODUCTS"] == "float32":
        products.compute_in_float32()


_compute_bf16_products()


def pytest_report_header():
    return f"BF16 products: {os.environ['TEST_BF16_PRODUCTS']}"


@pytest.fixture(scope="module")
def stock_bf16_products():
    """torch's own BF16 products, in a file's tests and in the processes that they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_BF16_PRODUCTS", "bf16")
        bf16_products().restore()
        yield
    _compute_bf16_products()


@pytest.fixture
def single_process_group(tmp_path):
    """A gloo process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def rank_of_two():
    """A process group in which this is the first of two ranks; its collectives move nothing."""
    dist.init_process_group("fake", rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@contextlib.contextmanager
def _started(modules):
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), modules)
        durations.SERVERS.append(server)
        yield server.python
        durations.SERVERS.remove(server)
        server.stop()


def _forked(modules):
    """With ``TEST_FORKED=0`` it is the real Python: old releases of some packages import a host."""
    if os.environ.get("TEST_FORKED") == "0":
        yield sys.executable
        return
    with _started(modules) as python:
        yield python


@pytest.fixture(scope="session")
def forked_python():
    """Path of a Python for scripts that has torch imported, but neither hosts nor this package."""
    yield from _forked(MODULES)


@pytest.fixture(scope="session")
def forked_hosts():
    """As `forked_python`, with hosts and this package imported as well."""
    yield from _forked(HOSTS)


@pytest.fixture(autouse=True, scope="module")
def _what_is_imported_is_no_garbage():
    """The collector leaves alone what exists before a file's tests: a tenth of the time otherwise.

    Hundreds of thousands of objects belong to imported modules, and each full collection visits
    them; what the tests of this file leave behind is collected, as ever.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _ranks_end_with_a_file():
    """Hosts take a process for a rank if the environment says so, and open its process group."""
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ[name] for name in names if name in os.environ}
    yield
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_config_from_outside(monkeypatch):
    monkeypatch.delenv("TORCH_FP8_CONFIG", raising=False)


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    """Dynamo compiles a function a limited number of times in a process."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


@pytest.fixture
def spy(monkeypatch):
    """``spy(owner, name, note)``: what ``note`` returns for the arguments of each later call."""

    def install(owner, name, note):
        noted, original = [], getattr(owner, name)

        def call(*args, **kwargs):
            noted.append(note(*args, **kwargs))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)
        return noted

    return install


@pytest.fixture
def te(monkeypatch):
    """``transformer_engine.pytorch`` on the CPU: a stub."""
    from tests.internals import transformer_engine

    for name in [n for n in sys.modules if n.partition(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    transformer_engine.native_recipe.cache_clear()
    monkeypatch.setattr(transformer_engine, "_is_cuda", lambda device: True)
    monkeypatch.setattr("torch_fp8.conversion.convert.check_driver", lambda device: None)
    for name, module in transformer_engine_stub.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield sys.modules["transformer_engine.pytorch"]
    transformer_engine.native_recipe.cache_clear()


class _Clock:
    """Stands for a card's; its table has microseconds of each (N, K), without FP8 and by recipe.

    Layers that are timed together take the sum, unless the table has a row for the tuple of them.
    """

    def __init__(self, table):
        self.table, self.runs = table, []

    def __call__(self, device, run):
        run()
        self.runs.append(run)
        shapes = tuple(tuple(layer.weight.shape) for layer in run.layers)
        rows = [self.table[shapes]] if shapes in self.table else [self.table[s] for s in shapes]
        return 1e-6 * sum(
            plain if run.recipe is None else fp8[run.recipe.name] for plain, fp8 in rows
        )


@pytest.fixture
def timed(monkeypatch):
    """``timed({(N, K): (us, {recipe: us})})``: recipe auto finds these times, on the CPU, too.

    It returns an object whose ``runs`` are the passes that were timed.
    """
    from tests.internals import layer_benchmark

    def install(table):
        clock = _Clock(table)
        monkeypatch.setattr(layer_benchmark, "seconds", clock)
        monkeypatch.setattr(
            "torch_fp8.conversion.autotune.runs_natively", lambda device, recipe: True
        )
        return clock

    layer_benchmark.layer_times.cache_clear()
    yield install
    layer_benchmark.layer_times.cache_clear()
