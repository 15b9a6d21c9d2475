"""The planner page: a model, a cluster and a few sliders; the planner's numbers follow, computed in the browser.

Python exports what does not depend on a slider, as data; JavaScript computes the rest as the planner does.

    model_laws.py       a model → its operations and storages as laws, and the steps of all strategies
    priced_step.py      a step's instructions, with bytes where the planner's own have seconds
    column_table.py     steps that differ only in numbers → one step, and a column of numbers
    device_tables.py    devices, links and calibrations → what the kernel model reads
    planner_document.py all of it as one HTML file, or as the page of a server
    planner_server.py   `shardwise plan --serve`: the page, models on demand, dropped config.json files

    memory.js           storages → peaks: stream_peak.py and replay.py of planner/memory
    ledger.js allocator.js  what the caching allocator reserves: allocations.py, allocator.py and reserved.py
    kernels.js          operations → seconds: kernel_model.py, borrowed.py and compute.py
    queues.js           instructions → the time of a step: collective.py and queues.py
    search.js           settings → candidates, the frontier and the recommendation: planner/search
    charts.js view.js   what is drawn
    page.js             the controls

A test holds both to the same numbers (tests/unit/report/planner_page/test_planner_numbers.py).
"""

from shardwise.report.planner_page.planner_document import planner_page

__all__ = ["planner_page"]
