"""The planner page: choose a model, a cluster and a few settings, and the browser computes the planner's numbers.

Python exports everything that does not depend on a setting, as data; JavaScript computes the rest as the planner does.

    page_plans.py       the plans that the page offers
    model_laws.py       model → its operations and storages as laws, and the steps of all strategies
    strategy_steps.py   plans → their steps in parts: time, memory, allocations
    priced_step.py      the instructions of a step, with bytes in place of the planner's seconds
    column_table.py     steps that differ only in numbers → one step, and columns of numbers
    value_tables.py     values → their numbers in tables
    device_tables.py    devices, links and calibrations → the tables of the kernel model
    planner_document.py the page as one HTML file, or as the page of a server
    planner_server.py   `shardwise plan --serve`: the page, models on demand, dropped config.json files
    trace_apart.py      the model of a dropped config.json, in a process of its own with limits
    page.html planner.css   its elements and their style

    memory.js           storages → peaks: stream_peak.py and replay.py of planner/memory
    ledger.js allocator.js  what the caching allocator reserves: allocations.py, allocator.py and reserved.py
    kernels.js          operations → seconds: kernel_model.py, borrowed.py and compute.py
    queues.js           instructions → the time of a step: collective.py and queues.py
    search.js           settings → candidates, the frontier and the recommendation: planner/search
    charts.js view.js   charts, and everything else that is shown
    page.js             the controls

A test compares both implementations (tests/unit/report/planner_page/test_planner_numbers.py).
"""
