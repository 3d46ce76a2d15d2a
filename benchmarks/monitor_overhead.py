"""What a measured step costs, paired with the step beside it.

    nice -n 19 python -m benchmarks.monitor_overhead        # from the root, two minutes

A Llama of 3 million parameters trains with ``FP8Config(monitor=2)``: every second step is measured,
and its processor time is compared with that of the step before it. What is measured costs the same
at any interval, so the share at an interval of N is the difference over N steps. Writes
``monitor_overhead.csv``. Here FP8 is emulated, which makes steps long; on a card
nothing has been measured.
"""

import argparse
import statistics
import time

import torch

from benchmarks.comparison import tiny_llama
from benchmarks.rows import add_csv, write_rows
from torch_fp8 import FP8Config, Monitor, convert_optimizer, convert_to_float8

DEFAULT_INTERVAL = 100
PROBES = {"without probes": (), "with both probes": ("clip_search", "logit_sharpness")}


def pairs(recipe: str, probes: tuple[str, ...], number: int) -> list[tuple[float, float]]:
    """Processor seconds of a step that is not measured and of the measured one after it."""
    torch.manual_seed(0)
    model = tiny_llama.build(512, 256, 4, pad_token_id=0, eos_token_id=1)
    config = FP8Config(recipe=recipe, monitor=2, monitor_probes=probes)
    convert_to_float8(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    convert_optimizer(optimizer, config, model=model)
    monitor = Monitor(model, [optimizer], config, log=lambda series, step: None)
    seconds = []
    for _ in range(2 * number + 4):
        ids = torch.randint(0, 512, (4, 128))
        started = time.process_time()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        monitor.observe_loss(loss)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - started)
    return list(zip(seconds[4::2], seconds[5::2], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=25)
    add_csv(parser, "monitor_overhead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for recipe in ("tensorwise", "delayed"):
        for name, probes in PROBES.items():
            measured = pairs(recipe, probes, options.pairs)
            step = statistics.median(plain for plain, _ in measured)
            more = statistics.median(watched - plain for plain, watched in measured)
            share = 100 * more / step / DEFAULT_INTERVAL
            rows.append([recipe, name, len(measured), f"{1000 * step:.1f}", f"{1000 * more:.1f}"])
            rows[-1] += [f"{100 * more / step:.1f}", f"{share:.2f}"]
            print(*rows[-1], sep=", ", flush=True)
    columns = ["recipe", "probes", "pairs", "step_ms", "more_ms", "more_percent", "percent_at_100"]
    write_rows(options.csv, columns, [dict(zip(columns, row, strict=True)) for row in rows])


if __name__ == "__main__":
    main()
