"""Pages, tables and figures from results."""

from qmargin.report.write import ReportOptions, write_report

__all__ = ["ReportOptions", "write_report"]
