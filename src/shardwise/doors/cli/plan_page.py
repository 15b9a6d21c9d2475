"""`shardwise plan --serve`: the planner page, from a server on this machine."""

import webbrowser

from shardwise.base.errors import InvalidPlan
from shardwise.doors.cli.plan_options import PlanOptions
from shardwise.doors.cli.plan_service import PlanService
from shardwise.measure.report.planner_page.planner_server import PlannerServer


def serve_page(options: PlanOptions, *, port: int, opens: bool) -> None:
    """Serve the page, which opens with these options, until Ctrl+C; `opens`: in the browser, if there is one."""
    if options.devices is not None or options.here or options.cluster.endswith(".toml"):
        raise InvalidPlan(
            "--serve: the page chooses among the devices of the package; --devices and --here are without it"
        )
    service = PlanService(options)
    with PlannerServer(service.answers, port=port) as server:
        try:
            print(f"{server.address} (Ctrl+C to stop)", flush=True)
            if opens:
                _open(server.address)
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def _open(address: str) -> None:
    """Open the address in a browser with windows: one in the terminal would take it over."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    if type(browser) is not webbrowser.GenericBrowser:
        browser.open_new_tab(address)
