"""Metrics, traces, event logs and the web page, all fed by events. Imported by composers only."""
