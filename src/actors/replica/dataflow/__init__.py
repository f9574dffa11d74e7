"""Moves one dataflow forward. Other packages use its actor, `DataflowActor`."""

from actors.replica.dataflow.dataflow import DataflowActor as DataflowActor
