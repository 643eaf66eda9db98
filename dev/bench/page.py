"""One offline HTML page: the tables of `document`, with the plots inside it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from dev.bench.document import markdown
from dev.bench.report import Row

PAGE_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>deuteron bench</title>
<style>
  body { font: 14px/1.5 system-ui, sans-serif; color: #222; margin: 2rem auto; max-width: 75rem;
         padding: 0 1rem; }
  h1, h2, h3 { line-height: 1.2; margin: 2rem 0 .5rem; }
  p, ul { max-width: 45rem; }
  .wide { overflow-x: auto; }
  table { border-collapse: collapse; font-size: 12px; font-variant-numeric: tabular-nums; }
  th, td { padding: .15rem .5rem; border-bottom: 1px solid #ddd; text-align: right;
           white-space: nowrap; }
  th:first-child, td:first-child, td:last-child { text-align: left; }
  thead th { position: sticky; top: 0; background: #fff; }
  pre { background: #f5f5f5; padding: .5rem; overflow-x: auto; }
  img { max-width: 100%; display: block; margin: 1rem 0; }
</style>
</head>
<body>
{% for block in blocks %}
{% if block.kind == "heading" %}<h{{ block.level }}>{{ block.text }}</h{{ block.level }}>
{% elif block.kind == "table" %}<div class="wide"><table>
<thead><tr>{% for c in block.rows[0] %}<th>{{ c }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in block.rows[1:] %}<tr>{% for c in row %}<td>{{ c }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>
{% elif block.kind == "code" %}<pre>{{ block.text }}</pre>
{% elif block.kind == "list" %}<ul>{% for i in block.rows %}<li>{{ i }}</li>{% endfor %}</ul>
{% else %}<p>{{ block.text }}</p>
{% endif %}
{% endfor %}
<h2>Plots</h2>
{% for name, data in images %}<img alt="{{ name }}" src="data:image/png;base64,{{ data }}">
{% endfor %}
</body>
</html>
"""


def write_page(documents: Sequence[Row], out: Path) -> Path:
    """Writes `out`/index.html with the PNG files of `out`; its path."""
    from jinja2 import Environment

    images = [
        (p.stem, base64.b64encode(p.read_bytes()).decode()) for p in sorted(out.glob("*.png"))
    ]
    page = Environment(autoescape=True).from_string(PAGE_TEMPLATE)
    path = out / "index.html"
    path.write_text(
        page.render(blocks=blocks(markdown(documents)), images=images), encoding="utf-8"
    )
    return path


def blocks(text: str) -> list[dict[str, object]]:
    """The Markdown that `document` writes (headings, paragraphs, lists, code, tables), as data."""
    parts: list[dict[str, object]] = []
    for chunk in text.split("\n\n"):
        lines = chunk.strip("\n").split("\n")
        plain = chunk.replace("`", "").replace("*", "").strip()
        if lines[0].startswith("#"):
            level = len(lines[0]) - len(lines[0].lstrip("#"))
            parts.append({"kind": "heading", "level": level, "text": plain.lstrip("# ")})
        elif lines[0].startswith("|"):
            rows = [[c.strip() for c in line.strip("|").split(" | ")] for line in lines]
            parts.append({"kind": "table", "rows": [rows[0], *rows[2:]]})
        elif lines[0].startswith("    "):
            parts.append({"kind": "code", "text": "\n".join(line[4:] for line in lines)})
        elif lines[0].startswith("- "):
            items = " ".join(line.strip() for line in plain.split("\n"))
            parts.append({"kind": "list", "rows": items.removeprefix("- ").split(" - ")})
        elif plain:
            parts.append({"kind": "text", "text": plain})
    return parts
