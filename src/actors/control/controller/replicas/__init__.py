"""The replicas that the controller speaks to: one history for all, one answer out of theirs."""
