"""The report: one self-contained HTML page about runs, and the list of runs."""

from understudy.report.page import write_report

__all__ = ["write_report"]
