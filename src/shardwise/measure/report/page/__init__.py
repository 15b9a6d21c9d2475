"""The page of a bench: one HTML file that opens offline, in light and dark mode, also on a phone.

    markup.py                     HTML elements; escapes all text
    html_document.py              a complete document with its content security policy
    axes.py                       round numbers for an axis
    bars.py plots.py lanes.py     the charts
    section.py                    a section of the page
    head.py memory.py speed.py training.py timeline.py forecast.py facts.py     the sections
    anatomy.py frames.py captions.py anatomy.html anatomy.css anatomy.js anatomy_pictures.js    the anatomy of a step
    timeline.js                   zoom of the timelines
    document.py page.css          all sections in their order, and their style

Charts are SVG that is drawn here, with widths in percent: they reflow, their text keeps its size, and their colours
are CSS variables. So a page has 100 to 500 kB instead of the 5 MB of a plotting library, needs no script for its charts
and no `unsafe-eval` in its policy, and every number of a picture is also in a table below it.
"""
