"""Prometheus, Grafana and alerts beside Ray on the head."""
