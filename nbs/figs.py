"""The one plot style of the book: `style` gives a figure its look, `line`/`bar` draw the common ones, `show` stores it.

Every chapter draws through this file, so that all pictures read alike, also in black and white: series differ by dash, marker and
hatching as well as by colour, and every axis names its unit. It belongs to the notebooks and isn't part of the package:

    from figs import line, show
    show(line({"paged": (x, y), "contiguous": (x, y2)}, title="Sequences that fit", x="memory (GiB)", y="sequences"), "fig-fit")
"""
import plotly.graph_objects as go
import plotly.io as pio

COLORS = ["#1f4e79", "#c55a11", "#4f7a28", "#7f7f7f", "#7030a0", "#000000"]
DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"]
MARKERS = ["circle", "square-open", "diamond", "triangle-up-open", "x", "cross"]
PATTERNS = ["", "/", ".", "x", "-", "+"]
GRID = "#dddddd"

_axis = dict(showline=True, linecolor="black", mirror=True, ticks="outside", gridcolor=GRID, zeroline=False, automargin=True)
pio.templates["book"] = go.layout.Template(layout=dict(
    colorway=COLORS, font=dict(family="Helvetica, Arial, sans-serif", size=13), xaxis=_axis, yaxis=_axis,
    title=dict(x=0.01, xanchor="left", font=dict(size=16)), legend=dict(bordercolor=GRID, borderwidth=1),
    height=380, margin=dict(l=70, r=20, t=50, b=60)))
pio.templates.default = "book"   # a figure made without `style` looks right too; far smaller in the page than plotly's own template


class Fig:
    "A plotly figure shown as text/html with a fixed id, so that running the notebook again gives the same bytes"
    def __init__(self, fig, name): self.fig, self.name = fig, name

    def _repr_mimebundle_(self, include=None, exclude=None):
        # "plot-": a Quarto label may carry the same name, and two elements with one id would make plotly draw into the wrong one
        html = self.fig.to_html(full_html=False, include_plotlyjs="cdn", div_id=f"plot-{self.name}",
                                config=dict(responsive=True, displayModeBar=False))
        return {"text/html": html, "text/plain": f"<plotly figure {self.name}>"}


def style(fig, title=None, x=None, y=None, **layout):
    "Title and axis titles of `fig`, the latter *with their unit*; more `layout` goes to plotly as it is. Returns `fig`"
    fig.update_layout(**layout)
    if title: fig.update_layout(title_text=title)
    else: fig.update_layout(margin_t=20)
    if x: fig.update_xaxes(title_text=x)
    if y: fig.update_yaxes(title_text=y)
    return fig


def mark(i, filled=False):
    "How series number `i` is drawn: keyword arguments for `go.Scatter` (or for `go.Bar` with `filled=True`)"
    c = COLORS[i % len(COLORS)]
    if filled: return dict(marker=dict(color=c, line=dict(color="black", width=1), pattern=dict(shape=PATTERNS[i % len(PATTERNS)], solidity=0.4)))
    return dict(line=dict(color=c, dash=DASHES[i % len(DASHES)], width=2), marker=dict(symbol=MARKERS[i % len(MARKERS)], size=8, color=c))


def line(series, title=None, x=None, y=None, log_x=False, log_y=False, **kw):
    "Lines with markers from `{name: (xs, ys)}`; a logarithmic x axis is ticked at the values measured"
    fig = go.Figure([go.Scatter(x=list(xs), y=list(ys), name=name, mode="lines+markers", **mark(i))
                     for i, (name, (xs, ys)) in enumerate(series.items())])
    if log_x: fig.update_xaxes(type="log", tickvals=sorted({v for xs, _ in series.values() for v in xs}))
    if log_y: fig.update_yaxes(type="log")
    return style(fig, title, x, y, showlegend=len(series) > 1, **kw)


def bar(series, title=None, x=None, y=None, stacked=False, **kw):
    "Bars from `{name: (labels, heights)}`, side by side or stacked"
    fig = go.Figure([go.Bar(x=list(xs), y=list(ys), name=name, **mark(i, filled=True)) for i, (name, (xs, ys)) in enumerate(series.items())])
    return style(fig, title, x, y, showlegend=len(series) > 1, barmode="stack" if stacked else "group", **kw)


def show(fig, name):
    """Show a plotly figure under the fixed name `name`, unique in the book; put it last in a cell.

    For a captioned, numbered figure that text can point at with `@fig-fit`, start the cell with
    `#| label: fig-fit` and `#| fig-cap: "..."`; the same `name` may be used here.
    """
    return Fig(fig, name)
