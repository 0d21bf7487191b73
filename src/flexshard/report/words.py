"""Words of the page, and how it looks."""

from __future__ import annotations

__all__ = ["GLOSSARY", "STYLE"]

GLOSSARY = {
    "rank": "A process of the training job, with one GPU.",
    "row": "A row of an embedding table: the vector of one id.",
    "reads per sample": "How often a row is expected to be looked up for one sample; above 1 where samples repeat it.",
    "tier": "Rows of a table that are placed alike, a range of them in order of how often they are read.",
    "data parallel": "Rows that every GPU has a copy of: read without communication, their gradients all-reduced.",
    "flex": "Rows that are split over the GPUs of a group, such as a node, and copied to every group.",
    "row wise": "Rows that only one GPU has. Their ids and vectors cross the network in an all-to-all.",
    "exposed communication": "Time in which GPUs wait for the network, since nothing else hides it.",
    "static memory": "Weights, optimizer states, and gradients and buffers of copies: the same in every step.",
    "dynamic memory": "Rows that a batch looks up, and their gradients: as large as the batch makes it.",
    "neutral budget": "No more memory per GPU than row-wise sharding needs.",
    "lower bound": "A time below which no plan within the budget gets, under the same cost model.",
}

STYLE = """
:root{--ink:#1b1b1b;--soft:#5b5b5b;--line:#d8d8d8;--page:#fff;--card:#f6f6f6}
@media (prefers-color-scheme:dark){:root{--ink:#ececec;--soft:#a8a8a8;--line:#444;--page:#161616;--card:#222}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:860px;margin:0 auto;padding:20px 16px 60px}
h1{font-size:1.5rem;line-height:1.25;margin:.2em 0 .6em}
h2{font-size:1.2rem;margin:2em 0 .5em;border-bottom:1px solid var(--line);padding-bottom:.2em}
h3{font-size:1rem;margin:1.6em 0 .2em;overflow-wrap:anywhere}
nav{display:flex;flex-wrap:wrap;gap:.3em 1em}
a{color:inherit}
svg{width:100%;height:auto;display:block;margin:.4em 0}
svg text{fill:var(--ink);font:12px system-ui,sans-serif}
svg .end{text-anchor:end}svg .middle{text-anchor:middle}
svg .grid{stroke:var(--line)}svg .limit{stroke:var(--ink);stroke-dasharray:4 3}
svg .mark{stroke:var(--ink);stroke-width:2}svg .bound{stroke:var(--soft);stroke-dasharray:5 4}
table{border-collapse:collapse;font-size:.9rem}
th,td{padding:.25em .7em;border-bottom:1px solid var(--line);text-align:left}
th{color:var(--soft);font-weight:600}.n{text-align:right;font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto}
pre{background:var(--card);padding:.8em;overflow-x:auto;font-size:.82rem;white-space:pre-wrap}
.legend{display:flex;flex-wrap:wrap;gap:.2em 1.2em;font-size:.85rem;color:var(--soft);margin:.4em 0}
.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.4em}
dt{font-weight:600;margin-top:.6em}dd{margin:0;color:var(--soft)}
@media (max-width:560px){svg text{font-size:20px}}
"""
