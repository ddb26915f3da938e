"""The report of the side-by-side benchmark as one page that loads nothing."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from bench_serving.bench_files import Run
from bench_serving.bench_plan import BASELINE
from bench_serving.figures import BYTES, CONTEXT, WARM
from bench_serving.noise import OTHERS_LIMIT, PROBE_LIMIT
from bench_serving.report_markdown import COLUMNS, RATIOS, lines_of, noise_sentence, verdicts
from sglang_plt.results import Row

_STYLE = """
:root{--bg:#fff;--fg:#1b1f24;--dim:#68707a;--line:#dfe3e8;--row:#f5f7f9;--good:#2b8a3e;--bad:#c92a2a;--warn:#e67700}
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e4e7ea;--dim:#929aa3;--line:#30363d;--row:#1d2125;
--good:#69db7c;--bad:#ff8787;--warn:#ffa94d}}
body{background:var(--bg);color:var(--fg);font:14px/1.5 system-ui,sans-serif;margin:24px auto;max-width:1180px;
padding:0 20px}
h1{font-size:21px;margin:0 0 6px}h2{font-size:16px;margin:30px 0 8px}p{margin:4px 0}.dim{color:var(--dim)}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;white-space:nowrap}
th{font-weight:500;color:var(--dim);vertical-align:bottom;white-space:normal;line-height:1.2}
th,td{text-align:right;padding:3px 14px 3px 0}
.l{text-align:left}tr.first>td{border-top:1px solid var(--line)}tr.base>td{background:var(--row)}
img{max-width:100%;background:#fff;border:1px solid var(--line);border-radius:6px;margin:6px 0}
.good{color:var(--good)}.bad{color:var(--bad);font-weight:600}.warn{color:var(--warn)}
code{font:12px ui-monospace,monospace}
""".strip()

_CAPTIONS = {
    BYTES: (
        "What the bytes buy",
        "Every arm has the same bytes of KV, pool and encoded rows together. Bars are 95 % intervals.",
    ),
    CONTEXT: (
        "Cost as context grows",
        "Time to the first token of follow-up turns by length of the prompt: a dot a request, lines through medians.",
    ),
    WARM: (
        "Where the time of a warm request goes",
        "Means over follow-up requests. What brings rows back and evicts is counted by the server; the rest of the "
        "time to the first token, with attention over the whole context and queueing, is split by tokens into those "
        "that the server had seen before and those that were new.",
    ),
}
_CLASSES = {"met": "good", "missed": "bad"}


def page(run: Run, rows: Sequence[Row], figures: Sequence[Path]) -> str:
    """The report as an HTML document, with the figures in it.

    Raises:
        OSError: a figure cannot be read.
    """
    disturbed = any(run.disturbed(note) for note in run.notes) or not run.notes
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>Prefix caches side by side</title><style>{_STYLE}</style></head><body>",
        "<h1>Prefix caches side by side</h1>",
        *(f'<p class="dim">{escape(line)}</p>' for line in run.setup),
        f'<p class="{"bad" if disturbed else "good"}">{escape(noise_sentence(run))}</p>',
        *_targets(run, rows),
        *_numbers(run, rows),
        *_figures(figures),
        *_conditions(run),
        *_noise(run),
        f"<h2>Again</h2><p><code>python -m bench_serving.bench {escape(run.command)}</code></p>",
        "<p>The requests are in <code>records/</code> beside this page, a JSON line each. "
        "<code>python -m bench_serving.bench --report-only DIR</code> makes the report from them.</p>",
        "</body></html>",
    ]
    return "\n".join(parts)


def _table(heads: Sequence[str], left: int, lines: Sequence[tuple[str, Sequence[str]]]) -> Iterator[str]:
    """Lines of (class, cells that are HTML); the first ``left`` columns are flush left."""

    def cell(tag: str, index: int, text: str) -> str:
        return f"<{tag}{' class=l' if index < left else ''}>{text}</{tag}>"

    yield '<div class="wide"><table>'
    yield f"<tr>{''.join(cell('th', index, escape(head)) for index, head in enumerate(heads))}</tr>"
    for kind, cells in lines:
        yield f'<tr class="{kind}">{"".join(cell("td", index, text) for index, text in enumerate(cells))}</tr>'
    yield "</table></div>"


def _targets(run: Run, rows: Sequence[Row]) -> Iterator[str]:
    found = verdicts(run, rows)
    if not found:
        return
    yield f"<h2>Against {BASELINE}</h2>"
    yield '<p class="dim">Ratios, with 95 % intervals over the same sessions (and repeats) of both.</p>'
    lines = []
    for index, verdict in enumerate(found):
        kind = "first" if index and verdict.arm != found[index - 1].arm else ""
        name = f'<span class="{_CLASSES.get(verdict.verdict, "warn")}">{verdict.verdict}</span>'
        cells = (verdict.arm, verdict.metric, verdict.measured, verdict.target)
        lines.append((kind, [*map(escape, cells), name]))
    yield from _table(("arm", "ratio", "measured", "wanted", ""), 2, lines)


def _numbers(run: Run, rows: Sequence[Row]) -> Iterator[str]:
    yield "<h2>Numbers</h2>"
    yield '<p class="dim">TTFT is of follow-up turns, those after the first of a session. Failed requests count in '
    yield "cached share, throughput and failures; they have no latency.</p>"
    heads = ["workload", "condition", "arm", *(title for _, title, _ in COLUMNS)]
    heads += [f"{title} / {BASELINE}" for _, title in RATIOS]
    lines, before = [], None
    for line in lines_of(run, rows):
        group = line.workload, line.condition
        kind = f"{'first' if before not in (None, group) else ''} {'base' if line.arm == BASELINE else ''}".strip()
        lines.append((kind, [escape(cell) for cell in (*group, line.arm, *line.cells, *line.ratios)]))
        before = group
    yield from _table(heads, 3, lines)


def _figures(paths: Sequence[Path]) -> Iterator[str]:
    for path in paths:
        title, caption = _CAPTIONS[path.name]
        data = base64.b64encode(path.read_bytes()).decode()
        yield f'<h2>{title}</h2><p class="dim">{escape(caption)}</p>'
        yield f'<img alt="{escape(title)}" src="data:image/png;base64,{data}">'


def _conditions(run: Run) -> Iterator[str]:
    yield "<h2>Workloads and memory</h2>"
    lines = [
        ("", [escape(name), *(f"{sizes[key]:,}" for key in ("sessions", "requests", "working_set", "longest"))])
        for name, sizes in run.workloads.items()
    ]
    yield from _table(("workload", "sessions", "requests", "tokens, distinct", "longest history"), 1, lines)
    lines = []
    for condition, sizes in run.conditions.items():
        total = run.total_bytes(condition)
        if total is not None:
            pressures = ", ".join(f"{name} {run.pressure(name, condition):.2f}" for name in run.workloads)
            slots = total // sizes["row_bytes"]
            cells = (condition, f"{total:,}", f"{slots:,}", f"{sizes['pool_tokens']:,}", f"{sizes['cold_bytes']:,}")
            lines.append(("", [*map(escape, cells), escape(pressures)]))
    if lines:
        heads = ("condition", "bytes of KV", "SGLang: slots", "plt: slots", "plt: cold bytes", "working set / bytes")
        yield from _table(heads, 1, lines)
    yield '<p class="dim">One request at a time, in rounds: the first turn of every session, then the second, ...</p>'


def _noise(run: Run) -> Iterator[str]:
    yield "<h2>Noise</h2>"
    yield '<p class="dim">Servers in the order in which they ran. Probe: a fixed piece of work on all cores, before '
    yield "and after, over the fastest of the run. Others: share of the cores' time that went to other processes. "
    yield f"Disturbed: above {PROBE_LIMIT:.2f} or {100 * OTHERS_LIMIT:.0f} %.</p>"
    lines = []
    for note in run.notes:
        others = "-" if note.others is None else f"{100 * note.others:.1f} %"
        load = f"{note.load[0]:.2f}, {note.load[1]:.2f}"
        bad = '<span class="bad">disturbed</span>' if run.disturbed(note) else "no"
        names = (note.arm, note.condition, str(note.repeat + 1))
        lines.append(("", [*map(escape, names), f"{run.probe_ratio(note):.3f}", others, load, bad]))
    yield from _table(("arm", "condition", "repeat", "probe", "others", "load before, after", ""), 2, lines)
