"""The report of a run: one self-contained HTML file, and its figures as PNGs.

It shows the loss with events, maps of layers and steps, the tensors closest to a bound, and the
events with their reasons.
"""

import base64
import html
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch_fp8._version import __version__
from torch_fp8.monitor.alarm import DEFAULT_BOUNDS, Bound
from torch_fp8.monitor.figures import EVENTS, FAINT, draw_loss, draw_map
from torch_fp8.monitor.heat_map import TOPICS, HeatMap, heat_map
from torch_fp8.monitor.page_style import STYLE
from torch_fp8.monitor.run_log import RunRecord
from torch_fp8.monitor.series import PREFIX
from torch_fp8.quantization.formats import E4M3

_WORST, _MOST_EVENTS = 12, 200
_BAD = {
    **{"alarm": "alarm", "loss_spike": "loss spike"},
    **{"fallback": "fallback", "restore": "return to a checkpoint"},
}
"""The events that the verdict counts, with labels."""
_BEST_DECIBEL = E4M3.cast_sqnr_db


def write_report(
    record: RunRecord,
    folder: Path,
    beside: Mapping[str, RunRecord] | None = None,
    name: str = "run",
) -> list[Path]:
    """Write ``report.html``, and a PNG for each of its figures.

    Args:
        record: the record of the run.
        folder: the folder for the files; it is created if it does not exist.
        beside: other runs by name, whose losses are drawn, too; differences are relative to the
            first.
        name: the name of the run.
    Returns:
        The files, the page first.
    Raises:
        ImportError: matplotlib is missing.
    """
    pictures: dict[str, bytes] = {}
    maps = [drawing for topic in TOPICS if (drawing := heat_map(record, topic)) is not None]
    drawn = [heat for heat in maps if not heat.is_blank]
    others = {name: run.losses for name, run in (beside or {}).items() if run.losses}
    if record.losses:
        pictures["loss"] = draw_loss(record.losses, record.events, others, name)
    pictures |= {heat.topic.statistic: draw_map(heat) for heat in drawn}
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "report.html"
    page.write_text(_page(record, name, maps, pictures), encoding="utf-8")
    written = [page]
    for key, picture in pictures.items():
        written.append(folder / f"{key}.png")
        written[-1].write_bytes(picture)
    return written


def _page(
    record: RunRecord, name: str, maps: Sequence[HeatMap], pictures: Mapping[str, bytes]
) -> str:
    body = [
        _head(record, name),
        *(f'<p class="note">{html.escape(note)}</p>' for note in record.notes),
        _tiles(record),
    ]
    if "loss" in pictures:
        body.append(_section("Loss", _image(pictures["loss"], "the loss of each step")))
    body.append(_events(record))
    body.append(_worst(record))
    for heat in maps:
        content = '<p class="quiet">Ideal in every layer and step that was measured.</p>'
        if not heat.is_blank:
            alt = f"{heat.topic.title}, {len(heat.rows)} layers"
            content = _image(pictures[heat.topic.statistic], alt)
        meaning = heat.topic.meaning
        if not heat.is_blank and any(map(math.isfinite, heat.bounds)):
            meaning += " Red begins at the alarm's bound, the black line beside the colours."
        if heat.away:
            meaning += " A violet line through a layer: it was out of FP8."
        body.append(_section(heat.topic.title, content, meaning, heat.topic.statistic))
    if not maps:
        body.append(_section("Layers", "<p>The run has no layer statistics.</p>"))
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(name)}: torch-fp8 report</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(body)}<footer>torch-fp8 {__version__}, from "
        f"{html.escape(record.path.name)}</footer></main></body></html>\n"
    )


def _head(record: RunRecord, name: str) -> str:
    counts = Counter(str(event["event"]) for event in record.events)
    pairs = [(counts[kind], words) for kind, words in _BAD.items() if counts[kind]]
    bad = ", ".join(f"{count} {words}{'s' if count > 1 else ''}" for count, words in pairs)
    verdict = f"{bad}." if bad else "No bound was crossed and the loss did not jump."
    options = ", ".join(f"{key}={value}" for key, value in record.config.items())
    return (
        f'<header><h1>{html.escape(name)}</h1><p class="options">{html.escape(options)}</p>'
        f'<p class="verdict {"bad" if bad else "good"}">{html.escape(verdict)}</p></header>'
    )


def _tiles(record: RunRecord) -> str:
    steps = max([*record.losses, *record.steps], default=0)
    layers = {n.rpartition("/")[0].rpartition("/")[0] for n in record.values}
    last = [record.losses[s] for s in sorted(record.losses)[-50:]]
    tiles = [
        ("steps", f"{steps:,}"),
        ("measured", f"{len(record.steps):,}"),
        ("layers", f"{len(layers):,}"),
        ("loss, the last 50 steps", f"{sum(last) / len(last):.4g}" if last else "unknown"),
        ("out of FP8 at the end", str(len(_out_of_fp8(record)))),
    ]
    cells = "".join(f"<div><b>{value}</b><span>{label}</span></div>" for label, value in tiles)
    return f'<div class="tiles">{cells}</div>'


def _events(record: RunRecord) -> str:
    if not record.events:
        return _section("What happened", '<p class="quiet">Nothing to report.</p>')
    rows = []
    for event in record.events[:_MOST_EVENTS]:
        colour, words = EVENTS.get(str(event["event"]), (FAINT, str(event["event"])))
        what = _breakable(str(event.get("what", ""))).replace("; fp8/", ";<br>fp8/")
        rows.append(
            f"<tr><td class='number'>{int(event['step']):,}</td>"
            f"<td><i style='background:{colour}'></i>{html.escape(words)}</td>"
            f"<td class='what'>{what}</td></tr>"
        )
    more = len(record.events) - _MOST_EVENTS
    if more > 0:
        rows.append(f"<tr><td></td><td></td><td>and {more} more, in the file</td></tr>")
    table = (
        f"<table><tr><th>step</th><th>event</th><th>what and why</th></tr>{''.join(rows)}</table>"
    )
    out = _out_of_fp8(record)
    note = f"Out of FP8 at the end: {_breakable(', '.join(out))}." if out else ""
    return _section("What happened", f'<div class="scroll">{table}</div>', note)


def _worst(record: RunRecord) -> str:
    bounds = {(bound.kind, bound.statistic): bound for bound in DEFAULT_BOUNDS}
    worst: list[tuple[float, str, int, dict[int, float], Bound]] = []
    for name, values in record.values.items():
        place, _, statistic = name.rpartition("/")
        bound = bounds.get((place.rpartition("/")[2], statistic))
        if bound is None or not values:
            continue
        nearest = {_nearness(value, bound): step for step, value in values.items()}
        step = nearest[max(nearest)]
        worst.append((_nearness(values[step], bound), name, step, values, bound))
    worst.sort(key=lambda row: -row[0])
    rows = []
    for nearness, name, step, values, bound in worst[:_WORST]:
        least = values[step] < bound.least or math.isinf(bound.most)
        limit = f"&ge; {bound.least:g}" if least else f"&le; {bound.most:g}"
        state = "over" if nearness > 1 else "near" if nearness > 0.5 else "fine"
        wide = 100 * min(nearness, 1.0)
        shown = _breakable(name.removeprefix(PREFIX))
        last = _number(values[max(values)])
        rows.append(
            f"<tr><td class='name'>{shown}</td>"
            f"<td class='number' data-is='worst'>{_number(values[step])}</td>"
            f"<td class='number' data-is='at step'>{step:,}</td>"
            f"<td class='number' data-is='last'>{last}</td>"
            f"<td class='number' data-is='bound'>{limit}</td>"
            f"<td><div class='bar {state}'><div style='width:{wide:.0f}%'></div></div></td></tr>"
        )
    if not rows:
        return ""
    head = (
        "<tr><th>tensor</th><th>worst</th><th>at step</th><th>last</th><th>bound</th><th></th></tr>"
    )
    return _section(
        "Worst tensors",
        f'<table class="worst">{head}{"".join(rows)}</table>',
        "The numbers that came closest to their bound; a full bar means that it was crossed.",
    )


def _nearness(value: float, bound: Bound) -> float:
    """Return 1 at the bound, above 1 beyond it, and less the farther a value is from it."""
    if math.isnan(value):
        return 0.0
    if value < bound.least:
        return 1.0 + (bound.least - value) / max(abs(bound.least), 1e-30)
    if math.isinf(bound.most):  # dB above the bound, relative to a good cast's
        return max(0.0, 1.0 - (value - bound.least) / (_BEST_DECIBEL - bound.least))
    if bound.most > 1e30 or not bound.most:  # only crossed or not
        return 2.0 if value > bound.most else 0.0
    return value / bound.most


def _image(picture: bytes, alt: str) -> str:
    data = base64.b64encode(picture).decode()
    image = f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">'
    return f'<div class="wide">{image}</div>'


def _section(title: str, content: str, note: str = "", key: str = "") -> str:
    below = f'<p class="meaning">{note}</p>' if note else ""
    identifier = f' id="{key}"' if key else ""
    return f"<section{identifier}><h2>{html.escape(title)}</h2>{below}{content}</section>"


def _out_of_fp8(record: RunRecord) -> list[str]:
    return [layer for layer, _, last in record.absences() if last == math.inf]


def _breakable(text: str) -> str:
    """Return text for the page in which names may wrap after a dot or a slash."""
    return re.sub(r"([\w\]][./])(?=[A-Za-z_\d])", r"\1<wbr>", html.escape(text))


def _number(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.3g}"
