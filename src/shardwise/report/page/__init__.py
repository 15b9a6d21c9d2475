"""The page of a bench: one HTML file that opens anywhere, offline, in light and dark, on a phone.

    markup.py                     elements; the one place where text is escaped
    axes.py                       round numbers for an axis
    bars.py plots.py lanes.py     the charts
    head.py memory.py speed.py training.py timeline.py forecast.py facts.py     the sections
    anatomy.py frames.py captions.py anatomy.js anatomy_pictures.js     the anatomy of a step
    timeline.js                   zoom of the timelines
    document.py page.css          the whole in its order, its looks
    content_policy.py             what a page may do

Charts are SVG that is drawn here, with widths in percent: they reflow, their text keeps its size, and their colours
are CSS variables. So a page is some 100 to 500 kB instead of the 5 MB of a plotting library's script, it needs no
script for its charts and no `unsafe-eval` in its policy, and each number of a picture is also in a table below it.
"""

from shardwise.report.page.document import page_of

__all__ = ["page_of"]
