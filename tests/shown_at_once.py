"""A plugin: each failure is printed when it happens, not only at the end (`-p
tests.shown_at_once`)."""

from __future__ import annotations

import pytest


class _Shown:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """In a run with several workers this is called in the process that prints."""
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None or not report.failed:
            return
        terminal.ensure_newline()
        terminal.section(f"{report.nodeid} ({report.when})", sep="_", red=True)
        terminal.line(report.longreprtext)
        terminal.flush()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Shown(config))
