"""Metrics, traces, journals and the web page, all fed by events. Imported by composers only."""
