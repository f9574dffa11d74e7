"""Moves one dataflow forward; `DataflowActor`, its actor, is what other packages use."""

from actors.replica.dataflow.dataflow import DataflowActor as DataflowActor
