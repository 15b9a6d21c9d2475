"""The planner page: choose a model, a cluster and a few settings, and see what `shardwise plan` answers.

The page computes nothing: it asks the server of `shardwise plan --serve`, whose answers are those of the command
(doors/cli/plan_service.py), and draws them.

    planner_server.py    HTTP on the loopback address, for one page
    planner_document.py  the page with controls, or with one answer as a file
    page.html planner.css controls.html    its elements and their style

    charts.js            charts of given numbers
    view.js              everything that is shown of an answer
    page.js              controls, address and questions
    saved.js             a saved answer, which has none of these
"""
