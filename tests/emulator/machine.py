"""Runs a kernel: programs in waves, threads in groups that are at the same block."""

from typing import Any

import numpy as np

from tests.emulator.approximate import Approximate
from tests.emulator.faults import Divergence, NeverEnds
from tests.emulator.global_memory import GlobalMemory
from tests.emulator.ptx import Kernel
from tests.emulator.schedule import Lockstep, Schedule
from tests.emulator.shared_memory import SharedMemory
from tests.emulator.threads import WARP, Threads
from tests.emulator.translate import DTYPES, Translated, kind_of, translated

Values = Any
MOST_BLOCKS = 200_000
"""Blocks that the programs on the card run before it is said that they never end."""


class Launch:
    """One launch of a kernel.

    Args:
        text: its PTX.
        parameters: their bytes, as the kernel's text places them.
        grid: numbers of programs.
        shared: bytes of shared memory of a program.
        memory: the tensors that it may access.
        schedule: order of warps and programs.
        approximate: functions that are not exact.
        watch: sees accesses, barriers and atomic operations.
        most_blocks: bound on what the programs on the card run.
    """

    def __init__(
        self,
        text: str,
        parameters: bytes,
        grid: tuple[int, int, int],
        shared: int,
        memory: GlobalMemory,
        schedule: Schedule | None = None,
        approximate: Approximate | None = None,
        most_blocks: int = MOST_BLOCKS,
    ) -> None:
        self.kernel, self.blocks = translated(text)
        self.grid, self.shared_size = grid, shared
        self.memory, self.schedule = memory, schedule or Lockstep()
        self.approximate = approximate or Approximate()
        self.most_blocks = most_blocks
        self.parameters = parameters

    def run(self) -> None:
        """Run all programs, as many at once as the schedule has on the card."""
        count = int(np.prod(self.grid))
        programs = self.schedule.programs(count)
        at_once = max(1, self.schedule.lanes // self.kernel.threads)
        with np.errstate(all="ignore"):
            for start in range(0, count, at_once):
                Wave(self, programs[start : start + at_once]).run()


class Wave:
    """Programs that are on the card at the same time.

    Args:
        launch: they belong to.
        programs: their numbers.
    """

    def __init__(self, launch: Launch, programs: np.ndarray) -> None:
        self.launch, self.programs = launch, programs
        self.kernel: Kernel = launch.kernel
        self.grid, self.threads = launch.grid, launch.kernel.threads
        self.count = len(programs) * self.threads
        self.tid = np.tile(np.arange(self.threads, dtype=np.uint32), len(programs))
        self.program = np.repeat(np.arange(len(programs)), self.threads)
        self.warp = (self.tid // WARP + 1).astype(np.uint8)
        x, y, z = np.unravel_index(programs, launch.grid, order="F")
        numbers = [np.repeat(n, self.threads).astype(np.uint32) for n in (x, y, z)]
        self.ctaid = [n[0] if len(programs) == 1 else n for n in numbers]
        self.approximate = launch.approximate
        self.memory_watch = launch.memory.watch
        self.memory = launch.memory
        self.shared = SharedMemory(len(programs), launch.shared_size, launch.memory.watch)
        self._registers: dict[str, Values] = {}
        self._runnable: dict[int, np.ndarray] = {0: np.arange(self.count)}
        self._waiting: dict[int, np.ndarray] = {}
        self._left = np.zeros(self.count, bool)
        self._whole = [block.whole_warps for block in launch.blocks]
        self._all = Threads(self, None)
        for watch in self.memory_watch:
            watch.begins(self)

    def run(self) -> None:
        """Run until all threads have left."""
        blocks, steps = self.launch.blocks, 0
        while self._runnable or self._waiting:
            if not self._runnable:
                self._pass_barriers()
                continue
            number, index = self.launch.schedule.choose(self._runnable, self._whole)
            self._take(number, index)
            self._run_block(blocks[number], number, index)
            steps += 1
            if steps > self.launch.most_blocks:
                names = np.unique(self.programs[self.program[index]])[:4]
                what = f"no end after {steps} blocks; programs {names.tolist()} go on"
                raise NeverEnds(what, blocks[number].line)
            if not isinstance(self.launch.schedule, Lockstep):
                self._pass_full_barriers()

    def parameter(self, offset: int, dtype: type) -> Values:
        return np.frombuffer(self.launch.parameters, dtype, 1, offset)[0]

    def atomic(
        self,
        line: int,
        g: Threads,
        address: Values,
        name: str,
        order: str,
        kind: str,
        values: tuple[Values, ...],
        guard: Values,
    ) -> Values:
        """Do an atomic operation for each thread, in the order of the schedule.

        Returns:
            What was there before.
        """
        dtype = DTYPES[kind]
        active = np.flatnonzero(np.broadcast_to(True if guard is None else guard, g.count))
        result = np.zeros(g.count, dtype)
        address = np.broadcast_to(address, g.count)
        operands = [np.broadcast_to(value, g.count) for value in values]
        for i in self.launch.schedule.order(len(active)):
            place = int(active[i])
            one = self.launch.memory.one(line, g, place, int(address[place]), dtype)
            for watch in self.memory_watch:
                watch.synchronises(g, place, int(address[place]), order)
            old = result[place] = one[0]
            one[0] = _combined(name, old, [values[place] for values in operands])
        return result

    def _take(self, number: int, index: np.ndarray) -> None:
        """Remove threads from those that are about to run a block."""
        all_there = self._runnable.pop(number)
        if len(index) < len(all_there):
            self._runnable[number] = np.setdiff1d(all_there, index, assume_unique=True)

    def _run_block(self, block: Translated, number: int, index: np.ndarray) -> None:
        g = self._all if len(index) == self.count else Threads(self, index)
        for watch in self.memory_watch:
            watch.runs(block, g)
        inputs = [self._read(name, g) for name in block.inputs]
        outputs = block.run(self, g, *inputs)
        for name, values in zip(block.outputs, outputs, strict=False):
            self._write(name, g, values)
        if block.leave or (block.target < 0 and number + 1 == len(self.launch.blocks)):
            self._left[index] = True
        elif block.wait:
            self._add(self._waiting, number + 1, index)
        elif block.target < 0:
            self._add(self._runnable, number + 1, index)
        elif not block.conditional:
            self._add(self._runnable, block.target, index)
        else:
            taken = np.broadcast_to(outputs[-1], g.count)
            self._add(self._runnable, block.target, index[taken])
            self._add(self._runnable, number + 1, index[~taken])

    def _read(self, name: str, g: Threads) -> Values:
        values = self._registers.get(name)
        if values is None:
            bits = self.kernel.width(name)
            return np.bool_(False) if bits == 1 else DTYPES[kind_of(f"b{bits}")].type(0)
        return g.of(values)

    def _write(self, name: str, g: Threads, values: Values) -> None:
        if g.index is not None:
            old = self._registers.get(name)
            whole = np.empty(self.count, values.dtype)
            whole[:] = 0 if old is None else old
            whole[g.index] = values
            values = whole
        self._registers[name] = values

    def _add(self, groups: dict[int, np.ndarray], number: int, index: np.ndarray) -> None:
        if not len(index):
            return
        there = groups.get(number)
        groups[number] = index if there is None else np.sort(np.concatenate([there, index]))

    def _pass_full_barriers(self) -> None:
        """Let programs go on whose threads are all at a barrier, while others still run."""
        for number, index in list(self._waiting.items()):
            sizes = np.bincount(self.program[index], minlength=len(self.programs))
            full = sizes == self.threads
            if full.any():
                self._release(number, index, full)

    def _pass_barriers(self) -> None:
        """Let all go on that wait at a barrier; all threads of a program must."""
        for number, index in list(self._waiting.items()):
            sizes = np.bincount(self.program[index], minlength=len(self.programs))
            some = (sizes > 0) & (sizes < self.threads)
            if some.any():
                at = int(np.flatnonzero(some)[0])
                what = f"{sizes[at]} of {self.threads} threads of program {self.programs[at]} wait"
                line = self.launch.blocks[number - 1].line
                raise Divergence(f"{what} at a barrier that the others never reach", line)
            self._release(number, index, sizes > 0)

    def _release(self, number: int, index: np.ndarray, programs: np.ndarray) -> None:
        goes = programs[self.program[index]]
        del self._waiting[number]
        self._add(self._waiting, number, index[~goes])
        self._add(self._runnable, number, index[goes])
        self.shared.settle(np.flatnonzero(programs))
        for watch in self.memory_watch:
            watch.passes_barrier(self, np.flatnonzero(programs))


def _combined(name: str, old: Values, operands: list[Values]) -> Values:
    """Return what an atomic operation writes."""
    if name == "cas":
        return operands[1] if old == operands[0] else old
    value = operands[0]
    functions = {
        "add": lambda: old + value,
        "max": lambda: max(old, value),
        "min": lambda: min(old, value),
        "exch": lambda: value,
        "and": lambda: old & value,
        "or": lambda: old | value,
        "xor": lambda: old ^ value,
    }
    return functions[name]()
