"""Moves one dataflow forward; `DataflowActor`, its actor, is what other packages use."""

from actors.dataflow.dataflow import DataflowActor as DataflowActor
