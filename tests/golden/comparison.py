"""The file of recorded bits, whether a machine can be compared with it, and what differs.

Bits are compared where stock torch gives the same bits as on the machine that recorded: a run in
BF16, one in float32 and a product of FP8 operands, all without this package.
"""

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.golden.training import SAVED_AFTER, Run, adamw, llama

FILE = Path(__file__).with_name("bits.json")
_STOCK_STEPS = range(1, 11)


def machine() -> dict[str, str]:
    """What may change the bits of stock torch; it is named where they differ."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }


def stock() -> dict[str, Any]:
    """Bits of stock torch: of two training runs and of an FP8 product."""
    made: dict[str, Any] = {}
    for name, autocast in (("bf16", True), ("float32", False)):
        model = llama()
        made[name] = Run(model, adamw(model), autocast=autocast).train(_STOCK_STEPS)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(96, 96, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones(())
    product = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32)
    made["fp8"] = hashlib.sha256(product.numpy().tobytes()).hexdigest()
    return made


def why_not_comparable(recorded: dict[str, Any]) -> str | None:
    """What is not as it was where the bits were recorded, or None if they must be the same."""
    here, there = machine(), recorded["machine"]
    differs = [
        f"{key} {here[key]} (recorded with {there[key]})" for key in here if here[key] != there[key]
    ]
    if _release(here["torch"]) != _release(there["torch"]):
        return f"bits belong to a release of torch: {'; '.join(differs)}"
    if as_text(stock()) == recorded["stock"]:
        return None
    what = "; ".join(differs) or "nothing that is known of the machine differs"
    return f"stock torch gives other bits here than where they were recorded: {what}"


def _release(version: str) -> list[str]:
    return version.partition("+")[0].split(".")[:2]


def as_text(made: Any) -> Any:
    """As it stands in the file: floats in hexadecimal, a series in one string."""
    if isinstance(made, dict):
        return {name: as_text(value) for name, value in made.items()}
    return " ".join(map(float.hex, made)) if isinstance(made, list) else made


def differences(recorded: dict[str, Any], made: dict[str, Any], name: str = "") -> list[str]:
    """A line for each series, with the first value that differs, and for each state that does."""
    lines = []
    for key in dict.fromkeys([*recorded, *made]):
        want, got = recorded.get(key, ""), made.get(key, "")
        if isinstance(want, dict) and isinstance(got, dict):
            lines += differences(want, got, f"{name}{key} ")
        elif want != got:
            lines.append(f"{name}{key}: {_first(str(want).split(), str(got).split())}")
    return lines


def _first(want: list[str], got: list[str]) -> str:
    if len(want) != len(got):
        return f"{len(want)} values are recorded, {len(got)} were made"
    place = next(i for i, pair in enumerate(zip(want, got, strict=True)) if pair[0] != pair[1])
    return f"value {place + 1} of {len(want)} is recorded as {want[place]}, and was {got[place]}"


def not_resumed(made: dict[str, Any]) -> list[str]:
    """Of a run as text: where the resumed one does not go on as the other one did."""
    lines = []
    for key, resumed in made["resumed"].items():
        got = resumed.split()
        want = made[key].split()
        if want[len(want) - len(got) :] != got:
            lines.append(f"{key} after step {SAVED_AFTER} are not those of the run that went on")
    return lines


def read() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(FILE.read_text())
    return recorded


def write(recorded: dict[str, Any]) -> None:
    FILE.write_text(json.dumps(recorded, indent=1) + "\n")
