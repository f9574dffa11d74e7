"""The replicas that the controller talks to: one command history for all, one answer merged from
theirs."""
