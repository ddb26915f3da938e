"""Makes everything that a benchmark leaves for readers, out of its records alone."""

from __future__ import annotations

from pathlib import Path

from bench_serving.bench_files import Directory
from bench_serving.bench_plan import BenchError
from bench_serving.bench_rows import rows_of
from bench_serving.figures import draw_all
from bench_serving.report_html import page
from bench_serving.report_markdown import table
from sglang_plt.results import Row, write_rows

ROWS, TABLE, REPORT = "rows.json", "table.md", "report.html"


def write_report(root: Path) -> tuple[list[Row], str]:
    """Write rows, table, figures and page into the directory; the rows and the table.

    Raises:
        BenchError: it has no records.
        FigureError: matplotlib is missing.
        OSError, ValueError: it is no directory of a benchmark, or cannot be written.
    """
    run, found = Directory(root).read()
    if not found:
        raise BenchError(f"{root} has no records")
    rows = rows_of(run, found)
    text = table(run, rows)
    write_rows(root / ROWS, rows)
    (root / TABLE).write_text(text, encoding="utf-8")
    figures = draw_all(run, found, rows, root)
    (root / REPORT).write_text(page(run, rows, figures), encoding="utf-8")
    return rows, text
