"""What a dry run shows of the data: what was dropped or changed and where, and some documents with their masks.

Data are other people's text: what could steer a terminal is shown as an escape.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from fullstride.data.chat import spans
from fullstride.data.examples import Example
from fullstride.data.packing import PackedRows
from fullstride.data.report import Report, line_numbers, safe
from fullstride.run.job import Job
from fullstride.run.source import load_tokenizer

SHOWN = 3  # documents
MOST = 1500  # characters of a stretch that is no label; more are left out of its middle


def preview(job: Job) -> None:
    """Print the table of counts and the first documents: in colour in a terminal, else with labels between « and »."""
    rows = job.loader.rows
    assert isinstance(rows, PackedRows) and job.tokenizer is not None
    tokenizer = load_tokenizer(job.tokenizer)
    examples = [rows.examples[i] for i in range(min(SHOWN, len(rows.examples)))]
    console = _console()
    if console is not None:
        _show(console, job.report, examples, tokenizer)
        return
    print("\n".join([*table(job.report), *(line for e in examples for line in document(e, tokenizer))]))


def table(report: Report) -> list[str]:
    """Plain lines: rows, reason, lines; the files before their own."""
    lines, last = [], None
    for event in report.events():
        if event["file"] != last:
            lines.append(safe(f"{event['file']}:"))
            last = event["file"]
        where = f"(line{'s' if event['count'] > 1 else ''} {line_numbers(event['lines'])})"
        lines.append(safe(f"  {event['count']:>7,}  {event['reason']}  {where}"))
    return ["rows  dropped or changed, and where", *lines] if lines else ["no row was dropped or changed"]


def title(example: Example) -> str:
    """Where a document comes from, and its sizes."""
    sizes = f"{len(example.ids):,} tokens, {example.supervised.sum():,} supervised"
    return safe(f"{example.file} line {example.line}: {sizes}")


def document(example: Example, tokenizer: Any) -> list[str]:
    """Plain lines: a document's title and text."""
    text = "".join(f"«{part}»" if label else part for part, label in _parts(example, tokenizer))
    return ["", f"{title(example)} (between « and »)", text]


def _parts(example: Example, tokenizer: Any) -> Iterator[tuple[str, bool]]:
    for text, label in spans(example, tokenizer):
        left_out = len(text) - MOST
        if not label and left_out > 0:
            text = f"{text[: MOST // 2]}[... {left_out:,} characters ...]{text[-MOST // 2 :]}"
        yield safe(text), label


def _console() -> Any:
    """rich's console where there is a terminal and rich, else None."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(highlight=False)


def _show(console: Any, report: Report, examples: list[Example], tokenizer: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    if events := report.events():
        counts = Table("file", "rows", "dropped or changed", "lines")
        for event in events:
            cells = event["file"], f"{event['count']:,}", event["reason"], line_numbers(event["lines"])
            counts.add_row(*(Text(safe(cell)) for cell in cells))  # a Text holds no markup
        console.print(counts)
    else:
        console.print("no row was dropped or changed")
    for example in examples:
        console.print()
        console.print(Text(title(example), style="bold").append("  supervised", style="bold green"))
        text = Text()
        for part, label in _parts(example, tokenizer):
            text.append(part, style="green" if label else "dim")
        console.print(text)
